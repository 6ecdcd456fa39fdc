"""Programs in which one function is replaced by an experiment with it."""

from __future__ import annotations

import inspect
from typing import Any, Literal

from marcog_trl.rewards import in_program


_SOURCE = inspect.getsource(in_program)


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
    return (
        f"__scope = {{}}\nexec({_SOURCE!r}, __scope)\n{target or function} = __scope[{kind!r}]({given})\ndel __scope"
    )
