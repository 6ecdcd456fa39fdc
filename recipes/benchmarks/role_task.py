"""
The task of capacity.py: teams whose agents each write one step of a chain, and the small model that knows such problems.

A problem lists k steps, "1. keep the even numbers.\\n2. add 3 to each number.", and agent j writes the function of step j. Steps are
those of the built-in problems that turn a list into a list, so any sequence fits. No code is run: a function is right if it is the
reference, and a problem is solved if all its functions are right.
"""

import inspect
import random
import zlib
from dataclasses import asdict, dataclass, replace
from statistics import fmean as mean

from marcog_trl import Agent, Workflow
from marcog_trl.agents import ask
from marcog_trl.embedded import BuildSettings
from marcog_trl.problems.builtin import STEPS


CHAIN_STEPS = {
    name: replace(step, ks=step.ks[:3]) for name, step in STEPS.items() if step.takes == step.gives == "numbers"
}
SPLITS = ("test", "test", "validation", "train", "train", "train", "train", "train", "train", "train")
SIZES = tuple(range(2, 9))


# Problems


def make_problems(split, num_steps, count, seed=0, meanings=None):
    """
    Problems of a split, as rows. No sequence of steps is in two splits. `wanted` has the functions that solve a problem: the right
    ones, or those that `meanings` names.
    """
    rng = random.Random(f"{split} {num_steps} {seed}")
    rows = []
    while len(rows) < count:
        names = rng.sample(list(CHAIN_STEPS), num_steps)
        if SPLITS[zlib.crc32(" ".join(names).encode()) % len(SPLITS)] != split:
            continue
        ks = [rng.choice(CHAIN_STEPS[name].ks) for name in names]
        lines = [
            f"{j}. {CHAIN_STEPS[name].text.format(k=k)}." for j, (name, k) in enumerate(zip(names, ks, strict=True), 1)
        ]
        row = {"prompt": "\n".join(lines), "steps": names, "ks": ks}
        wanted = [variants(row, j)[0 if meanings is None else meanings[j, name]] for j, name in enumerate(names, 1)]
        rows.append(row | {"wanted": wanted})
    return rows


def draw_meanings(kind, num_agents, seed):
    """Draws which of the three functions of a step is meant: (agent, step) → index. In `"agree"` it is the same for all agents."""
    rng = random.Random(f"meanings {seed}")
    common = {name: rng.randrange(3) for name in CHAIN_STEPS}
    own = {(j, name): rng.randrange(3) for j in range(1, num_agents + 1) for name in CHAIN_STEPS}
    return {key: common[key[1]] for key in own} if kind == "agree" else own


def write_step(problem, j, expression=None):
    """The function of step j of a problem, from 1 on, with another expression in place of the right one."""
    step, k = CHAIN_STEPS[problem["steps"][j - 1]], problem["ks"][j - 1]
    return f"def step{j}(x):\n    return {(expression or step.code).format(x='x', k=k)}"


def variants(problem, j):
    """The three functions of step j of a problem: the right one, and its two mistakes."""
    step = CHAIN_STEPS[problem["steps"][j - 1]]
    return [write_step(problem, j, expression) for expression in (step.code, *step.mistakes)]


# The workflow


OPENINGS = {  # what a prompt says before the problem
    "step": "You write step {}.",
    "any_step": "You write one of the steps.",
    "own_way": "You write step {} in your own way.",
}


class OwnWay(Workflow):
    """
    Agent j writes step j in its own way: each may mean something else by the same words.

    Args:
        num_agents (`int`, *optional*, defaults to `2`): Number of agents.
    """

    def __init__(self, num_agents=2):
        roles = (OPENINGS["own_way"].format(j) for j in range(1, num_agents + 1))
        self.agents = tuple(Agent(f"agent{j}", role) for j, role in enumerate(roles, 1))

    def play(self, problem):
        replies = yield {agent.name: ask(agent.role, problem["prompt"]) for agent in self.agents}
        return "\n\n\n".join(replies.values())


def own_step(replies, wanted, **columns):
    """1 for each agent that wrote the function that is wanted from it, else 0."""
    return [
        {agent: float(text == target) for (agent, text), target in zip(written.items(), targets, strict=True)}
        for written, targets in zip(replies, wanted, strict=True)
    ]


def measure(team, problems, num_samples):
    """The share of wanted functions that a team writes, sampled: one number per problem."""
    import torch

    torch.manual_seed(0)
    with team.evaluating():
        episodes = team.play([problem for problem in problems for _ in range(num_samples)])
    found = [
        mean(row.text == target for row, target in zip(episode.rows, episode.problem["wanted"], strict=True))
        for episode in episodes
    ]
    return [mean(found[i : i + num_samples]) for i in range(0, len(found), num_samples)]


def train(condition, model, seed, tokens, problems, folder, peft_config):
    """Trains a team with the reward `own_step` until it has generated `tokens` tokens, saves it, and returns the mean reward of each step."""
    from datasets import Dataset
    from learning import make_trainer
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = trainer.used["tokens"] >= tokens

    condition = replace(condition, rewards=(own_step,))
    trainer = make_trainer(condition, model, seed, Dataset.from_list(problems), folder, peft_config)
    trainer.add_callback(Stop())
    trainer.train()
    trainer.save_model()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


# The model


@dataclass(frozen=True)
class ChainBuildSettings(BuildSettings):
    """
    Settings of the model. Other fields are those of the embedded default model.

    Args:
        habit_share (`float`, *optional*, defaults to `0.5`): Share of the steps with a habitual mistake.
    """

    steps: int = 750
    clean_steps: int = 560
    vocab_size: int = 320
    hidden_size: int = 96
    intermediate_size: int = 256
    num_layers: int = 3
    habit_share: float = 0.5


LESSONS = {"step": 0.4, "any_step": 0.3, "own_way": 0.3}  # shares of the examples, by opening
TEXTS = [step.text.format(k=k) for step in CHAIN_STEPS.values() for k in step.ks]
WHOLES = (
    *(f"{j}. {text}." for j in range(1, max(SIZES) + 1) for text in TEXTS),
    "You write step ",
    "def step",
    "You write one of the steps.",
    " in your own way.",
    "(x):\n    return ",
    " for v in x",
)
"""Texts that are one token each, so that small a model learns fast to find a line by its number."""


def draw_habits(settings):
    """The habitual mistake of each step that has one, whoever writes it."""
    rng = random.Random(f"chain habits {settings.seed}")
    chosen = rng.sample(list(CHAIN_STEPS), round(settings.habit_share * len(CHAIN_STEPS)))
    return {name: rng.choice(CHAIN_STEPS[name].mistakes) for name in chosen}


def chain_model(folder, **changes):
    """The path of the model, which is built in `folder` unless it is there."""
    from common import built_once

    settings = ChainBuildSettings(**changes)
    parts = [
        asdict(settings),
        LESSONS,
        WHOLES,
        inspect.getsource(make_problems),
        inspect.getsource(build),
        inspect.getsource(make_examples),
    ]
    return built_once(folder, parts, lambda target: build(settings, target))


def build(settings, folder):
    """Build tokenizer and model, and save them."""
    import torch
    import transformers

    from marcog_trl.embedded import add_wholes, fit, make_model, make_tokenizer

    torch.set_num_threads(1)
    transformers.set_seed(settings.seed)
    sample = [row for size in SIZES for row in make_problems("train", size, 200)]
    replies = [text for row in sample for j in range(1, len(row["steps"]) + 1) for text in variants(row, j)]
    tokenizer = make_tokenizer([*(row["prompt"] for row in sample), *replies], settings.vocab_size)
    add_wholes(tokenizer, WHOLES)
    model = make_model(tokenizer, settings)
    embeddings = model.get_input_embeddings().weight.data
    for text in TEXTS:  # each line starts as the sum of its number and its text, or the model would hardly find a line
        vector = torch.randn(settings.hidden_size) * model.config.initializer_range
        for j in range(1, max(SIZES) + 1):
            token, number = tokenizer.convert_tokens_to_ids([f"{j}. {text}.", str(j)])
            embeddings[token] = embeddings[number] + vector
    fit(model, tokenizer, make_examples(tokenizer, settings), settings, folder)


def make_examples(tokenizer, settings):
    """Prompts of all openings and sizes, in order. At first, replies are right; then they have the model's habits and slips."""
    from marcog_trl.embedded import draw_mistake
    from marcog_trl.rollout.engine import encode_prompts

    rng, habits = random.Random(f"chain replies {settings.seed}"), draw_habits(settings)
    problems = {size: make_problems("train", size, 2000, seed="lessons") for size in SIZES}
    examples, total = [], settings.steps * settings.batch_size
    for i, name in enumerate(rng.choices(list(LESSONS), LESSONS.values(), k=total)):
        longest = min(
            max(SIZES), 2 + 12 * i // total
        )  # short problems first: with long ones, it would learn to find lines late
        row = rng.choice(problems[rng.randint(2, longest)])
        j = rng.randint(1, len(row["steps"]))
        step = CHAIN_STEPS[row["steps"][j - 1]]
        mistake = None
        if name == "own_way":
            mistake = rng.choice((None, *step.mistakes))
        elif i >= settings.clean_steps * settings.batch_size:
            mistake = draw_mistake(step, habits, settings, rng)
        [context] = encode_prompts(tokenizer, [ask(OPENINGS[name].format(j), row["prompt"])])
        reply = tokenizer(write_step(row, j, mistake))["input_ids"] + [tokenizer.eos_token_id]
        examples.append({"input_ids": context + reply, "labels": [-100] * len(context) + reply})
    return examples
