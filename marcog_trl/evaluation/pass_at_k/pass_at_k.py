"""
pass@k, judged in confined worker processes. It is called as `evaluate`'s own `code_eval`:

```python
import evaluate

pass_at_k = evaluate.load("marcog_trl/evaluation/pass_at_k")
tests = ["assert add(2, 3) == 5"]
programs = [["def add(a, b): return a * b", "def add(a, b): return a + b"]]
figures, results = pass_at_k.compute(references=tests, predictions=programs, k=[1, 2])
print(figures)  # {"pass@1": 0.5, "pass@2": 1.0}
```
"""

import ast

import datasets
import evaluate

from marcog_trl.evaluation.estimates import estimate_pass_at_k, which_k
from marcog_trl.execution import CodeExecutor, Job


_DESCRIPTION = """
The probability that at least one of k programs that a model wrote for a problem passes the problem's tests, estimated without
bias from n >= k of them, and averaged over problems. Programs run in confined worker processes, apart from the tests.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[list[str]]`): Programs, complete, by problem.
    references (`list[str]`): Tests of each problem: statements that raise where a program is wrong, such as
        `"assert add(2, 3) == 5"`. Tests that only define a function, as HumanEval's `check`, must call it.
    k (`list[int]`, *optional*): Which pass@k. By default those of 1, 5 and 10 that there are programs for.
    num_workers (`int`, *optional*): Worker processes. Defaults to the cores that this process may use.
    timeout (`float`, *optional*, defaults to `10.0`): Wall-clock limit of a program with its tests, in seconds.
    memory_mb (`int`, *optional*, defaults to `512`): Limit of a program's address space in MiB.
    isolation (`str`, *optional*, defaults to `"strict"`): `"strict"` refuses to run where the kernel cannot confine programs,
        `"best_effort"` uses what there is, `"none"` is for trusted code.

Returns:
    `tuple[dict, dict]`: `{"pass@1": ..., ...}`, and for every problem, by its index, a list of pairs: index of the program, and
    `{"task_id": ..., "passed": ..., "result": ..., "completion_id": ...}`, where `result` says `"passed"`, or why not.

Raises:
    ValueError: If a problem has no tests, or fewer programs than a k; nothing has run then.
    RuntimeError: If the executor failed, so that a program is neither right nor wrong.
"""

_CITATION = """\
@misc{chen2021evaluating,
    title  = {Evaluating Large Language Models Trained on Code},
    author = {Mark Chen and Jerry Tworek and Heewoo Jun and Qiming Yuan and others},
    year   = {2021},
    eprint = {2107.03374},
}"""


# Statements that test nothing by themselves
_INERT = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Pass
)  # fmt: skip


class PassAtK(evaluate.Metric):
    """pass@k of programs, judged in confined worker processes."""

    def _info(self):
        features = {
            "predictions": datasets.Sequence(datasets.Value("string")),
            "references": datasets.Value("string"),
        }
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(features),
            reference_urls=["https://huggingface.co/papers/2107.03374"],
        )

    def _compute(
        self,
        predictions,
        references,
        k=None,
        num_workers=None,
        timeout=10.0,
        memory_mb=512,
        isolation="strict",
    ):
        empty = [f"predictions[{i}]" for i, programs in enumerate(predictions) if not programs]
        if empty or not predictions:
            raise ValueError(
                f"{(empty or ['predictions'])[0]} is empty; ['def add(a, b): return a + b'] has a program"
            )
        fewest = min(map(len, predictions))
        ks = which_k(k, fewest)
        for size in ks:
            if not 1 <= size <= fewest:
                raise ValueError(
                    f"k={ks} has {size}, but the fewest programs of a problem are {fewest}; k from 1 to {fewest} works"
                )
        for i, tests in enumerate(references):
            _check_tests(i, tests)
        jobs = [
            Job(code, [tests]) for programs, tests in zip(predictions, references, strict=True) for code in programs
        ]
        with CodeExecutor(num_workers, timeout, memory_mb=memory_mb, isolation=isolation) as executor:
            verdicts = iter(executor.run(jobs))
        results = {
            i: [(c, _result(i, c, next(verdicts))) for c in range(len(programs))]
            for i, programs in enumerate(predictions)
        }
        correct = [(len(found), sum(result["passed"] for _, result in found)) for found in results.values()]
        figures = {
            f"pass@{size}": sum(estimate_pass_at_k(n, c, size) for n, c in correct) / len(correct) for size in ks
        }
        return figures, results


def _check_tests(index, tests):
    """Refuses tests that every program would pass."""
    try:
        statements = ast.parse(tests).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"references[{index}] is not Python: {error}; 'assert add(2, 3) == 5' works") from None
    names = [node.name for node in statements if isinstance(node, ast.FunctionDef)]
    if all(isinstance(node, _INERT) or _is_text(node) for node in statements):
        call = f"{names[-1]}(name_of_the_function)" if names else "assert add(2, 3) == 5"
        raise ValueError(f"references[{index}]={tests!r:.60} tests nothing; tests that end in {call!r} work")


def _is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _result(task_id, completion_id, verdict):
    if verdict.status == "infrastructure":
        raise RuntimeError(f"predictions[{task_id}][{completion_id}] could not be judged: {verdict.message}")
    passed = verdict.status == "passed"
    result = "passed" if passed else "timed out" if verdict.status == "timeout" else f"failed: {verdict.message}"
    return {"task_id": task_id, "passed": passed, "result": result, "completion_id": completion_id}
