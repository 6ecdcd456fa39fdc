"""Plays workflows on given replies and verdicts, without a model."""

from concurrent.futures import Future

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


class ScriptedExecutor:
    """Answers jobs with given verdicts in order, and keeps the jobs of each call."""

    def __init__(self, *verdicts):
        self.verdicts = list(verdicts)
        self.calls = []

    def run(self, jobs):
        self.calls.append(list(jobs))
        return [self.verdicts.pop(0) for _ in jobs]


def finished(result):
    """What an executor's `submit` returns, when the jobs are done."""
    future = Future()
    future.set_result(result)
    return future


def written(answer):
    """`generate`, `encode` and `decode` of the engine, for a model that writes the texts `answer(rows)`: tokens are characters."""

    def generate(rows):
        return [[ord(character) for character in text] for text in answer(rows)], None

    return generate, lambda prompts: [[0] for _ in prompts], lambda ids: ["".join(map(chr, i)) for i in ids]


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
