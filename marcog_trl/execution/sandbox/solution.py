"""The solution's side: runs the program and answers calls. Never sees a test or an expected value.

Nothing here can be trusted once the program runs, because the program shares this process and can change all of it. Only data
leaves the process, and those who read it decide what it is worth.
"""

import atexit
import contextlib
import io
import os
import socket
import sys
import types
from typing import Any

from . import output, server, values, wire
from .output import describe


def load(payload: dict) -> tuple[types.ModuleType, str | None]:
    """Runs the program as a module; returns the module, and what went wrong or `None`."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        exec(compile(payload["code"], "<solution>", "exec"), module.__dict__)
    except BaseException as error:
        return module, describe(error)
    missing = [name for name in payload["exports"] if name not in module.__dict__]
    required = payload["entry_point"]
    if missing and (required in missing or (required is None and len(missing) == len(payload["exports"]))):
        return module, f"the program does not define {', '.join(missing) if required is None else required}"
    return module, None


def serve_direct(control: socket.socket, payload: dict) -> None:
    """Makes one call after another and reports what each returned. It learns of a call when those before are answered."""
    module, problem = load(payload)
    wire.send(control, {"load": problem})
    if problem is not None:
        return
    codec, call = _copies, payload["call"]
    while True:
        name, args, kwargs = call
        try:
            function = module.__dict__[name]
            value = function(*[codec.decode(arg) for arg in args], **{k: codec.decode(v) for k, v in kwargs.items()})
            reply = {"r": codec.encode(value, wire.LARGEST_ANSWER)}
        except values.Uncrossable as error:
            reply = {"o": str(error), "b": _truth(value)}
        except KeyError if name not in module.__dict__ else () as error:  # noqa: B030
            reply = {"x": f"NameError: name {error} is not defined"}
        except BaseException as error:
            reply = {"x": describe(error)}
        try:
            wire.send(control, reply, wire.LARGEST_ANSWER)
        except wire.BrokenChannel as error:
            wire.send(control, {"o": f"a value that cannot be sent: {error}", "b": _truth(value)})
        try:
            call = wire.receive(control)
        except EOFError:
            return


def _truth(value: Any) -> bool | str:
    """The truth value of a value, or the exception that finding it raised, as text."""
    try:
        return bool(value)
    except BaseException as error:
        return describe(error)


def _opaque(value: Any) -> list:
    if values.plain_base(type(value)) is not None:
        return _copies.encode(values.plain(value), _copies.room)
    raise values.Uncrossable(f"an object of type {type(value).__name__}")


_copies = values.Codec(foreign=_opaque, shared=False)


def run_script(control: socket.socket, payload: dict, fds: list[int]) -> None:
    """Runs the program as a script with the given files as standard input and output."""
    os.dup2(fds[0], 0)
    os.dup2(fds[1], 1)
    for fd in fds:
        os.close(fd)
    stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
    stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    for name, stream in (("stdin", stdin), ("stdout", stdout)):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    problem = None
    try:
        code = compile(payload["code"], "<solution>", "exec")
    except BaseException as error:
        wire.send(control, {"script": describe(error), "kind": "error"})
        return
    try:
        exec(code, module.__dict__)
    except SystemExit as error:
        if error.code not in (None, 0):
            problem = f"exit status {error.code!r}"[:200]
    except BaseException as error:
        problem = describe(error)
    try:
        if problem is None:
            _finish(module, stdout)
        else:
            stdout.flush()  # what it printed before is kept
    except BaseException as error:
        problem = problem or describe(error)
    wire.send(control, {"script": problem, "kind": "failed"})


def _finish(module: types.ModuleType, stdout: io.TextIOWrapper) -> None:
    """Does what the interpreter does at the end of a script: waits for threads, calls functions registered with `atexit`,
    clears the module, and writes what is left in buffers."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    last = getattr(sys, "stdout", None)
    if last is not None and not getattr(last, "closed", False):
        last.flush()
    for name in list(vars(module)):  # files that the script left open
        vars(module)[name] = None
    with contextlib.suppress(ValueError):  # the script has closed or detached the stream
        stdout.flush()


def serve_judge(control: socket.socket, payload: dict, fd: int) -> None:
    """Loads the program and answers the judge until it is done."""
    module, problem = load(payload)
    wire.send(control, {"load": problem})
    if problem is not None:
        return
    output.recorder.forget()  # what it printed before any test
    with socket.socket(fileno=fd) as sock:
        server.Server(sock, payload["exports"], module).serve()
