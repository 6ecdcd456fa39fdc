"""
Two agents that must not write alike: both solve the problem, one with a single statement, the other with a line for each step.

    python recipes/train_shppo.py --config recipes/configs/qwen2.5-coder-0.5b-cpu-fixer.yaml --num_turns 1 \\
        --workflow recipes/benchmarks/styles.py:SamePrompt --reward recipes/benchmarks/styles.py:style_reward

`OwnPrompts` tells each agent its style. `SamePrompt` asks both agents the same, and only SHPPO's latents see their roles.
"""

import ast

from marcog_trl import Agent, Workflow, execution_reward
from marcog_trl.agents import ask, fill
from marcog_trl.parsing.replies import code_in


STYLES = {"brief": "a single return statement", "stepwise": "a line for each step"}
QUESTION = (
    "{{problem}}\n\nWrite the function with {}. Answer with one Python code block that begins with this line:\n"
    "```python\ndef {{entry_point}}({{arguments}}):\n```"
)


class OwnPrompts(Workflow):
    agents = tuple(Agent(name, QUESTION.format(text)) for name, text in STYLES.items())
    needs_entry_point = True

    def prompt(self, agent, problem):
        return self.ask(agent, problem)

    def play(self, problem):
        replies = yield {agent.name: self.prompt(agent.name, problem) for agent in self.agents}
        return replies["stepwise"]


class SamePrompt(OwnPrompts):
    def prompt(self, agent, problem):
        return ask(fill(QUESTION.format(" or with ".join(STYLES.values())), problem), problem["prompt"])


def style_of(code, name):
    """The style of the function `name` in code that parses, or `None` if it is not there."""
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return "brief" if len(node.body) - (ast.get_docstring(node) is not None) == 1 else "stepwise"


def style_reward(prompts, replies, entry_point, starter_code, executor=None, **columns):
    """For each agent, the share of the tests that its own function passes if it has the agent's style, else 0."""
    columns = {name: columns[name] for name in ("test", "test_format")} | {
        "entry_point": entry_point,
        "starter_code": starter_code,
    }
    rewards = [{} for _ in prompts]
    for agent in STYLES:
        texts = [own[agent] for own in replies]
        passed = execution_reward(prompts, texts, executor=executor, **columns)
        for i, text in enumerate(texts):
            problem = {"prompt": prompts[i], "entry_point": entry_point[i], "starter_code": starter_code[i]}
            rewards[i][agent] = passed[i] if style_of(code_in(problem, text), entry_point[i]) == agent else 0.0
    return rewards
