"""
Workflows and rewards from Python files, by names such as `my_team.py:Debate` and `my_reward.py:shortest`.

The file is run when it is loaded. It can import installed packages, but not the files beside it: a saved team keeps the file of
its workflow alone.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from marcog_trl.agents import Workflow, WorkflowFile
from marcog_trl.checks import nearest


def names_file(name: str) -> bool:
    """Whether a name is a file and something in it, such as `my_team.py:Debate`."""
    return str(name).rpartition(":")[0].endswith(".py")


def load_class(name: str) -> type[Workflow]:
    """
    Runs a Python file and returns a workflow that it defines.

    Args:
        name (`str`): File and class, such as `"my_team.py:Debate"`.

    Returns:
        `type[Workflow]`: The class, with the file as its `source_file`.

    Raises:
        ValueError: In one line, if the file cannot be read or run, or defines no such workflow.
    """
    file, _, class_name = name.rpartition(":")
    module, source = _run("workflow", name)
    defined = vars(module).items()
    own = {key: value for key, value in defined if isinstance(value, type) and value.__module__ == module.__name__}
    workflows = {key: value for key, value in own.items() if issubclass(value, Workflow)}
    if class_name in workflows:
        workflows[class_name].source_file = source
        return workflows[class_name]
    if class_name in own:
        raise ValueError(
            f"workflow={name!r}: {class_name} is not a Workflow. Write 'class {class_name}(Workflow):', with "
            "'from marcog_trl import Workflow'."
        )
    near = nearest(class_name, workflows) or next(iter(workflows), "")
    raise ValueError(
        f"workflow={name!r}: {file!r} defines no class {class_name!r}."
        + (f" Did you mean {file}:{near}?" if near else " Write one that inherits from marcog_trl.Workflow.")
    )


def load_function(name: str) -> Callable:
    """
    Runs a Python file and returns a reward function that it defines.

    Args:
        name (`str`): File and function, such as `"my_reward.py:shortest"`.

    Raises:
        ValueError: In one line, if the file cannot be read or run, or defines no such function.
    """
    file, _, function_name = name.rpartition(":")
    defined = vars(_run("reward", name)[0])
    if not callable(defined.get(function_name)):
        raise ValueError(f"reward={name!r}: {file!r} defines no function {function_name!r}.")
    return defined[function_name]


def _run(kind: str, name: str) -> tuple[ModuleType, WorkflowFile]:
    """Runs the file of a name as a module. `kind`: what the name is of, in errors."""
    path = Path(name.rpartition(":")[0])
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{kind}={name!r}: the file {str(path)!r} cannot be read: {error.strerror}.") from None
    module = ModuleType(f"marcog_trl_{kind}_{hashlib.sha256(content).hexdigest()[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    with _in_one_line(name, "cannot be imported", kind):
        exec(compile(content, module.__file__, "exec", dont_inherit=True), module.__dict__)
    return module, WorkflowFile(path.absolute(), content)


def make(cls: type[Workflow], name: str, options: Mapping[str, Any]) -> Workflow:
    """
    Makes a workflow of a class from a file, and checks its declaration.

    Args:
        cls (`type[Workflow]`): What `load_class(name)` returned.
        name (`str`): The name, for errors.
        options (`Mapping`): Arguments of the class, all of which it takes.

    Raises:
        ValueError: In one line, if the class needs other arguments, or raises an error.
    """
    for parameter in inspect.signature(cls).parameters.values():
        rest = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not rest and parameter.name not in options:
            raise ValueError(
                f"workflow={name!r} needs the argument {parameter.name!r}, which no setting gives. Give it a default value."
            )
    with _in_one_line(name, "cannot be made"):
        workflow = cls(**options)
        workflow.validate()
    return workflow


@contextmanager
def _in_one_line(name: str, what: str, kind: str = "workflow") -> Iterator[None]:
    """Replaces any error of a user's file by one that has the last line of its traceback, the file and the line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        file = str(Path(name.rpartition(":")[0]))
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        if isinstance(error, SyntaxError) and error.filename == file:
            lines = [error.lineno]
        where = f" ({file}, line {lines[-1]})" if lines else ""
        last = " ".join(traceback.format_exception_only(error)[-1].split())
        raise ValueError(f"{kind}={name!r} {what}: {last}{where}") from error
