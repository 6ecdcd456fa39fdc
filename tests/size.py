"""
Counts the code of each room, without blanks, comments and docstrings, and finds circles of imports:

    python tests/size.py

It fails if the package, the tests or the benchmarks exceed their budget, or if an import circle of the package, those of type
annotations included, has more than two files. Lower a budget when code goes; a change that needs a higher one says why.
"""

import ast
import sys
import tokenize
from collections import Counter
from pathlib import Path

import grimp
import networkx


ROOT = Path(__file__).parent.parent
BUDGETS = {"marcog_trl": 24_380, "tests": 23_910, "recipes/benchmarks": 2_345}
LARGEST_CIRCLE = 2  # files
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def lines_of_code(file: Path) -> int:
    """Returns the number of lines of a Python file that hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    with file.open("rb") as lines:
        code = {
            line
            for token in tokenize.tokenize(lines.readline)
            if token.type not in LAYOUT
            for line in range(token.start[0], token.end[0] + 1)
        }
    return len(code - docstrings)


def rooms(folder: Path) -> tuple[Counter, Counter]:
    """Returns the lines of code and the number of files by room: the folders directly below `folder`, or `.`."""
    lines, files = Counter(), Counter()
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).parts
        room = parts[0] if len(parts) > 1 else "."
        lines[room] += lines_of_code(file)
        files[room] += 1
    return lines, files


def circles(package: str) -> list[list[str]]:
    """Returns the groups of more than two modules that import each other, directly or not."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False)
    arrows = networkx.DiGraph(
        (module, imported) for module in graph.modules for imported in graph.find_modules_directly_imported_by(module)
    )
    found = networkx.strongly_connected_components(arrows)
    return sorted((sorted(group) for group in found if len(group) > 2), key=len, reverse=True)


def main() -> None:
    failures = []
    for name, budget in BUDGETS.items():
        lines, files = rooms(ROOT / name)
        print(f"{name}: {lines.total():,} lines of code, of at most {budget:,}, in {files.total()} files")
        for room, count in lines.most_common():
            print(f"  {room:20} {count:7,} {files[room]:5}")
        if lines.total() > budget:
            failures.append(f"{name} has {lines.total():,} lines of code. Its budget is {budget:,}.")
    for group in circles("marcog_trl"):
        print(f"circle of {len(group)} files: {' '.join(group)}")
        if len(group) > LARGEST_CIRCLE:
            failures.append(f"an import circle has {len(group)} files. At most {LARGEST_CIRCLE} are allowed.")
    sys.exit("\n".join(failures) or None)


if __name__ == "__main__":
    main()
