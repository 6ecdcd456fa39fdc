"""Programs in which one function is replaced by an experiment with it."""

from __future__ import annotations

import inspect
import marshal
from typing import Any, Literal

from marcog_trl.rewards import in_program


_CODE = marshal.dumps(compile(inspect.getsource(in_program), "<experiment>", "exec", dont_inherit=True, optimize=2))
"""Compiling it in each program would take longer than most programs. Workers run the same interpreter."""


def experiment(
    kind: Literal["frozen", "changed", "alone", "above", "below"], function: str, *arguments: Any, target: str = ""
) -> str:
    """
    Write code that goes after the definition of a function.

    Args:
        kind (`str`): Name of a function of [`~marcog_trl.rewards.in_program`].
        function (`str`): Name of the function.
        *arguments (`Any`): Literals that the experiment needs.
        target (`str`, *optional*): Name that is bound to the experiment. Defaults to `function`.

    Returns:
        `str`: Source.
    """
    given = ", ".join([function, *map(repr, arguments)])
    lines = (
        "import marshal as __scope",
        f"__code, __scope = __scope.loads({_CODE!r}), {{}}",
        "exec(__code, __scope)",
        f"{target or function} = __scope[{kind!r}]({given})",
        "del __code, __scope",
    )
    return "\n".join(lines)
