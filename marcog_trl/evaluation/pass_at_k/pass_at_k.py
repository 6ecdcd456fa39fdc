"""
pass@k, with programs run in sandboxed worker processes. Its interface follows `code_eval` of `evaluate`:

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
Unbiased estimate of the probability that at least one of k generated programs passes the tests of a problem, from n >= k
programs per problem, averaged over problems. Programs run in sandboxed worker processes, separate from the tests.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[list[str]]`): Complete programs of each problem.
    references (`list[str]`): Tests of each problem: statements that raise if the program is wrong, such as
        `"assert add(2, 3) == 5"`. If the tests define a function, such as HumanEval's `check`, they must also call it.
    k (`list[int]`, *optional*): Values of k. Defaults to 1, 5 and 10, without those above the number of programs.
    num_workers (`int`, *optional*): Worker processes. Defaults to the cores available to this process.
    timeout (`float`, *optional*, defaults to `10.0`): Limit of the CPU time of a program with its tests, in seconds.
    memory_mb (`int`, *optional*, defaults to `512`): Limit of a program's address space, in MiB.
    isolation (`str`, *optional*, defaults to `"strict"`): `"strict"` refuses to run if the kernel cannot isolate programs,
        `"best_effort"` uses the isolation that is available, `"none"` is for trusted code.

Returns:
    `tuple[dict, dict]`: The first is `{"pass@1": ..., ...}`. The second maps the index of each problem to a list of pairs of
    the index of a program and `{"task_id": ..., "passed": ..., "result": ..., "completion_id": ...}`. `result` is `"passed"`,
    or says why the program failed.

Raises:
    ValueError: If a problem has no tests, or fewer programs than the largest k. Raised before any program runs.
    RuntimeError: If the executor failed, so the program has no verdict.
"""

_CITATION = """\
@misc{chen2021evaluating,
    title  = {Evaluating Large Language Models Trained on Code},
    author = {Mark Chen and Jerry Tworek and Heewoo Jun and Qiming Yuan and others},
    year   = {2021},
    eprint = {2107.03374},
}"""


# Statements that do not test anything
_INERT = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Pass
)  # fmt: skip


class PassAtK(evaluate.Metric):
    """pass@k, with programs run in sandboxed worker processes."""

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
                f"{(empty or ['predictions'])[0]} is empty. Pass at least one program per problem, such as "
                "['def add(a, b): return a + b']."
            )
        ks = which_k(k, most=min(map(len, predictions)))
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
    """Refuses tests that every program passes."""
    try:
        statements = ast.parse(tests).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"references[{index}] is not valid Python: {error}. Pass statements such as 'assert add(2, 3) == 5'."
        ) from None
    names = [node.name for node in statements if isinstance(node, ast.FunctionDef)]
    tested = [node for node in statements if not isinstance(node, _INERT)]
    if all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in tested):
        call = f"{names[-1]}(name_of_the_function)" if names else "assert add(2, 3) == 5"
        raise ValueError(f"references[{index}]={tests!r:.60} does not test anything. End the tests with {call!r}.")


def _result(task_id, completion_id, verdict):
    if verdict.status == "infrastructure":
        raise RuntimeError(f"predictions[{task_id}][{completion_id}] has no verdict: {verdict.message}")
    passed = verdict.status == "passed"
    result = "passed" if passed else "timed out" if verdict.status == "timeout" else f"failed: {verdict.message}"
    return {"task_id": task_id, "passed": passed, "result": result, "completion_id": completion_id}
