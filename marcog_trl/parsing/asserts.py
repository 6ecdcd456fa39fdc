"""
Reads the one assert that a tester writes.

An assert that a model wrote may decide what the model earns. So it has to be a test of what a function returns, and nothing else: it
can neither look at the source of the function, nor at the clock, random numbers, files or addresses in memory.
"""

import ast

from marcog_trl.execution.analysis import direct
from marcog_trl.parsing.extract import extract_code
from marcog_trl.parsing.syntax import parse


def assert_in(reply: str, function: str) -> str | None:
    """
    Extract the assert of a reply: the first one at the top level of its code, if it tests a function.

    Args:
        reply (`str`): The reply.
        function (`str`): Name of the function to test.

    Returns:
        `str` or `None`: Source of the assert. `None` if there is no code, no assert, or one that does anything else than compare
        a call of the function, with literal arguments, with a literal (`==`, `!=`, `is`, `is not`), or ask for its truth.
    """
    code = extract_code(reply)
    tree = parse(code)
    found = next((node for node in tree.body if isinstance(node, ast.Assert)), None) if tree is not None else None
    if found is None or not isinstance(found.msg, ast.Constant | None):
        return None
    test = direct(found)
    return ast.get_source_segment(code, found) if test is not None and test.name == function else None
