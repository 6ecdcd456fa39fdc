"""Decides which jobs get a scratch folder: those whose tests work with files. The program's code has no influence on it."""

import ast
from collections.abc import Iterable
from functools import lru_cache


_FILE_MODULES = frozenset(
    "sqlite3 dbm shelve tempfile shutil pathlib glob fileinput zipfile tarfile gzip bz2 lzma openpyxl docx PyPDF2 pypdf".split()
)
_FILE_FUNCTIONS = frozenset(  # of os
    "path stat listdir scandir walk remove unlink rename replace mkdir makedirs rmdir removedirs chdir getcwd symlink link "
    "truncate access".split()
)


def uses_files(sources: Iterable[str]) -> bool:
    """
    Whether tests work with files.

    Args:
        sources (`Iterable[str]`): Parsable Python source texts of the tests and their set-up.

    Returns:
        `bool`: Whether they call `open`, import a module such as `sqlite3` or `tempfile`, or use a function of `os` that
        works with files.
    """
    return any(_uses_files(source) for source in sources)


@lru_cache(maxsize=4096)
def _uses_files(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "os" and node.attr in _FILE_FUNCTIONS:
                return True
            if node.value.id in _FILE_MODULES:
                return True
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in _FILE_MODULES for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _FILE_MODULES:
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            if any(alias.name in _FILE_FUNCTIONS for alias in node.names):
                return True
    return False
