"""
Workflows and rewards of one's own: from Python files, by names such as `my_team.py:Debate` and `my_reward.py:shortest`, and
programs that a command runs, such as `node my_agent.mjs`.

The Python file is run when it is loaded. It can import installed packages, but not the files beside it: a saved team keeps the
file of its workflow alone.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from marcog_trl.agents import Workflow, WorkflowFile
from marcog_trl.checks import nearest
from marcog_trl.workflows.program import Program


def names_file(name: str) -> bool:
    """Whether a name is a file and something in it, such as `my_team.py:Debate`."""
    return str(name).rpartition(":")[0].endswith(".py")


def names_command(name: str) -> bool:
    """Whether the name of a workflow is a command, such as `node my_agent.mjs`."""
    return len(str(name).split()) > 1 and not names_file(name)


def file_of(name: str) -> str:
    """The file that a name names: of a command, its first argument with a suffix. Empty if there is none."""
    if not names_command(name):
        return name.rpartition(":")[0] if names_file(name) else ""
    return next((part for part in _arguments(name) if not part.startswith("-") and Path(part).suffix), "")


def in_folder(name: str, folder: Path) -> str:
    """The same name, for the file's copy in a folder."""
    file = file_of(name)
    moved = str(folder / Path(file).name)
    if names_command(name):
        first, *_ = shlex.split(name)
        return shlex.join([first, *(moved if file and part == file else part for part in _arguments(name))])
    return moved + name.removeprefix(file) if file else name


def _arguments(command: str) -> list[str]:
    try:
        return shlex.split(command)[1:]
    except ValueError as error:
        raise ValueError(f"workflow={command!r} is not a command: {error}.") from None


def load_class(name: str) -> Callable[..., Workflow]:
    """
    Runs a Python file and returns a workflow that it defines.

    Args:
        name (`str`): File and class, or function of a program, such as `"my_team.py:Debate"`; or a command, which is not run.

    Returns:
        `Callable[..., Workflow]`: The class, with the file as its `source_file`. For a program, a class that makes a
        [`~marcog_trl.Program`] of it.

    Raises:
        ValueError: In one line, if the file cannot be read or run, or defines no such workflow.
    """
    if names_command(name):
        path = Path(file_of(name))
        with _in_one_line(name, "cannot be read"):
            source = WorkflowFile(path.absolute(), path.read_bytes()) if path.name else None
        return _program(name, source)
    file, _, class_name = name.rpartition(":")
    module, source = _run("workflow", name)
    if inspect.isroutine(function := vars(module).get(class_name)):
        return _program(function, source)
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


def _program(program: Callable | str, source: WorkflowFile | None) -> Callable[..., Workflow]:
    from_file = type("Program", (Program,), {"source_file": source})
    return functools.partial(from_file, program)


def load_function(name: str) -> Callable:
    """
    Runs a Python file and returns a reward function that it defines.

    Args:
        name (`str`): File and function, such as `"my_reward.py:shortest"`.

    Raises:
        ValueError: In one line, if the file cannot be read or run, or defines no such function.
    """
    file, _, function_name = name.rpartition(":")
    module, _ = _run("reward", name)
    if callable(function := vars(module).get(function_name)):
        return function
    own = {key: value for key, value in vars(module).items() if inspect.isfunction(value)}
    near = nearest(function_name, own) or next((key for key in own if own[key].__module__ == module.__name__), "")
    raise ValueError(
        f"reward={name!r}: {file!r} defines no function {function_name!r}."
        + (f" Did you mean {file}:{near}?" if near else " Write one that takes completions, and returns rewards.")
    )


def _run(kind: str, name: str) -> tuple[ModuleType, WorkflowFile]:
    """Runs the file of a name as a module. `kind`: what the name is of, in errors."""
    path = Path(name.rpartition(":")[0]).expanduser()
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


def make(cls: Callable[..., Workflow], name: str, options: Mapping[str, Any]) -> Workflow:
    """
    Makes a workflow of a class from a file, and checks its declaration.

    Args:
        cls (`Callable[..., Workflow]`): What `load_class(name)` returned.
        name (`str`): The name, for errors.
        options (`Mapping`): Arguments of the class, all of which it takes.

    Raises:
        ValueError: In one line, if the class needs other arguments, or raises an error.
    """
    agents = inspect.signature(cls).parameters.get("agents")
    if agents is not None and agents.default is agents.empty and "agents" not in options:
        raise ValueError(
            f"workflow={name!r} is a program. Set agents to the names that it uses as `model`, such as --agents planner coder."
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
        file = str(Path(file_of(name)).expanduser())
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        if isinstance(error, SyntaxError) and error.filename == file:
            lines = [error.lineno]
        where = f" ({file}, line {lines[-1]})" if lines else ""
        last = " ".join(traceback.format_exception_only(error)[-1].split())
        raise ValueError(f"{kind}={name!r} {what}: {last}{where}") from error
