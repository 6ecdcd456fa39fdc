"""Decides which jobs get a scratch folder: those whose tests work with files. The program's code has no influence on it."""

import ast
import re
from collections.abc import Iterable


_FILE_MODULES = frozenset(
    "sqlite3 dbm shelve tempfile shutil pathlib glob fileinput zipfile tarfile gzip bz2 lzma openpyxl docx PyPDF2 pypdf".split()
)
_FILE_FUNCTIONS = frozenset(  # of os
    "path stat listdir scandir walk remove unlink rename replace mkdir makedirs rmdir removedirs chdir getcwd symlink link "
    "truncate access".split()
)
_FILE_NAME = re.compile(r"[\w./-]+\.(?:csv|db|ini|jpg|json|log|md|pdf|png|sqlite|toml|tsv|txt|xml|yaml|yml|zip)")


def uses_files(nodes: Iterable[ast.AST]) -> bool:
    """
    Whether tests work with files.

    Args:
        nodes (`Iterable[ast.AST]`): All nodes of the tests and their set-up.

    Returns:
        `bool`: Whether they call `open`, import a module such as `sqlite3` or `tempfile`, use a function of `os` that works
        with files, or name a file such as `"cookies.json"`.
    """
    return any(map(_uses_files, nodes))


def _uses_files(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and _FILE_NAME.fullmatch(node.value) is not None
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "open"
    if isinstance(node, ast.Attribute):
        if not isinstance(node.value, ast.Name):
            return False
        return node.value.id in _FILE_MODULES or (node.value.id == "os" and node.attr in _FILE_FUNCTIONS)
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] in _FILE_MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        module = (node.module or "").partition(".")[0]
        return module in _FILE_MODULES or (
            node.module == "os" and any(alias.name in _FILE_FUNCTIONS for alias in node.names)
        )
    return False
