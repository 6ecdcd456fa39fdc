"""Plays workflows on given replies and verdicts, without the engine."""

from marcog_trl.agents import Consult, Execute
from marcog_trl.execution import TestResult, Verdict


PROBLEM = {
    "prompt": 'def total(xs):\n    """Double the numbers, then add them up."""\n',
    "entry_point": "total",
    "test": ["assert total([1, 2]) == 6", "assert total([]) == 0", "assert total([5]) == 10"],
    "test_format": "asserts",
}
AUX = "def aux(xs):\n    return [2 * x for x in xs]"
MAIN = "def total(xs):\n    ys = aux(xs)\n    return sum(ys)"


class Executor:
    """Answers every job with the same results, and keeps the jobs."""

    def __init__(self, *statuses):
        results = tuple(TestResult(status, "" if status == "passed" else "AssertionError") for status in statuses)
        passed = statuses.count("passed")
        self.verdict = Verdict("passed" if passed == len(statuses) else "failed", passed, len(statuses), results)
        self.jobs = []

    def run(self, jobs):
        self.jobs += jobs
        return [self.verdict for _ in jobs]


def play(workflow, replies, executor=None, problem=PROBLEM):
    """The prompts of an episode, stage by stage; `replies` holds each agent's replies in order."""
    pending = {name: iter(texts) for name, texts in replies.items()}
    generator = workflow.play(problem)
    stages = []
    try:
        request = next(generator)
        while True:
            if isinstance(request, Execute):
                request = generator.send(executor.run(request.jobs))
            elif isinstance(request, Consult):
                request = generator.send(request.advisor(request.questions))
            else:
                stages.append(request)
                request = generator.send({name: next(pending[name]) for name in request})
    except StopIteration:
        return stages


def last(prompt):
    assert prompt[-1]["role"] == "user"
    return prompt[-1]["content"]
