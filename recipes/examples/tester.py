"""
Tester, coder and fixer: a tester writes asserts while a coder writes the function, and a fixer reads what the asserts found.

    accelerate launch --config_file recipes/zero2.yaml recipes/train_shppo.py --config recipes/configs/qwen2.5-coder-1.5b.yaml \\
        --workflow recipes/examples/tester.py:TestAndFix
"""

from marcog_trl import Agent, Execute, Workflow
from marcog_trl.execution import Job
from marcog_trl.parsing.replies import code_in


class TestAndFix(Workflow):
    agents = (
        Agent(
            "tester", "Write up to five asserts that test the Python function asked for below, one per line. No code."
        ),
        Agent("coder", "Write the Python function asked for below. Code only."),
        Agent(
            "fixer",
            "Below are a problem, code for it and test results. The tests may be wrong. Correct the code. Code only.",
        ),
    )

    def play(self, problem):
        replies = yield {name: self.ask(name, problem) for name in ("tester", "coder")}
        tests = [line.strip() for line in replies["tester"].splitlines() if line.strip().startswith("assert")][:5]
        results = ["There are no tests."]
        if tests:
            code, name = code_in(problem, replies["coder"]), problem.get("entry_point") or None
            # One job per test: those that do not parse come back as verdicts, like those that fail
            verdicts = yield Execute([Job(code, [test], entry_point=name) for test in tests])
            results = [f"{test}: {verdict.message or 'passed'}" for test, verdict in zip(tests, verdicts, strict=True)]
        fixed = yield {
            "fixer": self.ask("fixer", problem, f"Code:\n{replies['coder']}", "\n".join(["Test results:", *results]))
        }
        return fixed["fixer"]
