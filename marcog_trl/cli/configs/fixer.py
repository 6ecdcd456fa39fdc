"""
Coder and fixer: a coder writes the function. If it fails the example of the problem, a fixer reads the code and the error, and
writes the function again.

    python recipes/train_magrpo.py --config recipes/configs/qwen2.5-coder-0.5b-cpu-fixer.yaml

The coder's reply is the solution of the first turn, and the fixer's that of the second, so each is rewarded for its own code.
"""

from marcog_trl import Agent, Execute, Slot, Workflow
from marcog_trl.parsing.replies import code_in
from marcog_trl.problems import solution_job


ANSWER = (
    "Answer with one Python code block that begins with this line:\n```python\ndef {entry_point}({arguments}):\n```"
)


class CodeAndFix(Workflow):
    agents = (
        Agent("coder", f"{{problem}}\n\nWrite {{entry_point}}. {ANSWER}"),
        Agent("fixer", f"{{problem}}\n\nWrite the correct code. {ANSWER}"),
    )
    slots = (Slot("coder"), Slot("fixer", turn=1))
    num_turns = 2
    needs_tests = True
    needs_entry_point = True

    def play(self, problem):
        draft = (yield {"coder": self.ask("coder", problem)})["coder"]
        (verdict,) = yield Execute([solution_job(problem, draft)])
        example = verdict.tests[0] if verdict.tests else verdict
        if example.status == "passed":
            return draft
        code = f"This code is wrong:\n```python\n{code_in(problem, draft) or draft}\n```"
        error = example.message or "It does not run."
        return (yield {"fixer": self.ask("fixer", problem, code, error)})["fixer"]

    def solution(self, problem, replies):
        return replies["coder"]
