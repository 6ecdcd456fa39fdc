"""Refuses tests that a judge cannot run: those that would run the program's text among the tests, and those that replace what
the program's process would have to see replaced.
"""

import ast
from collections.abc import Iterable


_RUN = frozenset("eval exec compile __import__ get_type_hints".split())  # functions that run text
_LOAD = frozenset(  # modules that run or build what they read
    "pickle _pickle cPickle dill cloudpickle joblib marshal shelve runpy importlib imp code codeop ctypes _ctypes".split()
)
_READ = frozenset("read_pickle load_module exec_module".split())
_STREAMS = frozenset(("sys.stdout", "sys.stderr"))


def reason(nodes: Iterable[ast.AST]) -> str | None:
    """
    Why a judge cannot run tests.

    Args:
        nodes (`Iterable[ast.AST]`): All nodes of the tests and their set-up.

    Returns:
        `str` or `None`: The reason with what to do, or `None` if the tests can be run.
    """
    for node in nodes:
        name = _runs_text(node)
        if name is not None:
            return (
                f"the tests use {name}, which could run the program's text among them. "
                "Compare values, or use ast.literal_eval or json"
            )
    return None


def _runs_text(node: ast.AST) -> str | None:
    """The name by which a node could run what a program returned or wrote."""
    if isinstance(node, ast.Name) and node.id in _RUN:
        return node.id
    if isinstance(node, ast.Attribute) and node.attr in (_RUN - {"compile"}) | _READ:
        return node.attr
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        found = [node.module or "", *(alias.name for alias in node.names)]
    elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
        return "allow_pickle"
    else:
        return None
    return next((name for name in found if name.partition(".")[0] in _LOAD or name in _RUN), None)
