"""The solution's side: runs the program and answers calls. Never sees a test or an expected value.

Nothing here is trusted once the program runs: it shares this process and can change all of it. What leaves the process is
data, and what the data are worth is decided by those who read it.
"""

import atexit
import builtins
import collections
import contextlib
import copy
import io
import operator
import os
import socket
import sys
import time
import traceback
import types
from typing import Any

from . import wire


def describe(error: BaseException, name: str = "<solution>") -> str:
    """The exception's type and message and the line of `name` that it came from."""
    if isinstance(error, SyntaxError) and error.filename == name:
        return f"{type(error).__name__}: {error.msg} (line {error.lineno}, column {error.offset})"[:500]
    try:
        text = "".join(traceback.format_exception_only(error)).strip()
    except Exception:
        text = type(error).__name__
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    return text[:450] + (f" (line {lines[-1]})" if lines else "")


def load(payload: dict) -> tuple[types.ModuleType, str | None]:
    """Runs the program as a module and returns it, and what went wrong or `None`."""
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
    """Makes one call after another and reports what each returned. Gets more calls when it has answered those it has."""
    module, problem = load(payload)
    wire.send(control, {"load": problem})
    if problem is not None:
        return
    codec, calls = _copies, collections.deque(payload["calls"])
    while calls:
        name, args, kwargs = calls.popleft()
        try:
            function = module.__dict__[name]
            value = function(*[codec.decode(arg) for arg in args], **{k: codec.decode(v) for k, v in kwargs.items()})
            reply = {"r": codec.encode(value)}
        except wire.Uncrossable as error:
            reply = {"o": str(error), "b": _truth(value)}
        except KeyError if name not in module.__dict__ else () as error:  # noqa: B030
            reply = {"x": f"NameError: name {error} is not defined"}
        except BaseException as error:
            reply = {"x": describe(error)}
        try:
            wire.send(control, reply, wire.LARGEST_ANSWER)
        except wire.BrokenChannel as error:
            wire.send(control, {"o": f"a value that cannot cross: {error}", "b": _truth(value)})
        if not calls:
            try:
                calls.extend(wire.receive(control))
            except EOFError:
                return


def _truth(value: Any) -> bool | str:
    """Whether a value counts as true, or why that cannot be said."""
    try:
        return bool(value)
    except BaseException as error:
        return describe(error)


def _opaque(value: Any) -> list:
    base = _base(type(value))
    if base is not None:
        return _copies.encode(_plain_value(value, base))
    raise wire.Uncrossable(f"an object of type {type(value).__name__}")


def _no_special(data: list) -> Any:
    raise wire.BrokenChannel(f"unknown tag {data[0]!r}")


_copies = wire.Codec(1, _opaque, _no_special, shared=False)


def run_script(control: socket.socket, payload: dict, fds: list[int]) -> None:
    """Runs the program as a script with the given files as standard input and output."""
    os.dup2(fds[0], 0)
    os.dup2(fds[1], 1)
    for fd in fds:
        os.close(fd)
    stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8", errors="replace")
    stdout = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", errors="surrogateescape"
    )
    for name, stream, mode in (("stdin", stdin, "r"), ("stdout", stdout, "w")):  # as the interpreter's own
        vars(stream)["mode"] = mode
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
    except BaseException as error:
        problem = describe(error)
    wire.send(control, {"script": problem, "kind": "failed"})


def _finish(module: types.ModuleType, stdout: io.TextIOWrapper) -> None:
    """What the interpreter does at the end of a script: waits for threads, calls what is registered, takes the module
    apart, and writes what is left in buffers."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    last = getattr(sys, "stdout", None)
    if last is not None and not getattr(last, "closed", False):
        last.flush()
    for name in list(vars(module)):  # files that the script left open
        vars(module)[name] = None
    with contextlib.suppress(ValueError):  # closed or detached by the script, which has put another in its place
        stdout.flush()


class Server:
    """Answers a judge's operations on the program's objects."""

    def __init__(self, sock: socket.socket, names: list[str], module: types.ModuleType):
        self.sock = sock
        self.codec = wire.Codec(1, self.hand_out, self.take_back)
        # the first handles go to the exports, in order, in every process of this program
        self.objects: list[Any] = [module.__dict__.get(name) for name in names]
        self.numbers: dict[int, int] = {}
        for number, value in enumerate(self.objects):
            self.numbers.setdefault(id(value), number)
        self.busy = False
        self.pending: BaseException | None = None
        self.codec.begin()
        hello = {name: self.codec.encode(module.__dict__[name]) for name in names if name in module.__dict__}
        self.codec.snapshot()
        wire.send(sock, {"exports": hello})

    def hand_out(self, value: Any) -> list:
        number = self.numbers.get(id(value))
        if number is None:
            number = self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        kind = type(value)
        flags = ""
        if kind is types.GeneratorType:
            flags = "g"
        elif kind is types.CoroutineType:
            flags = "o"
        elif isinstance(value, type) and issubclass(value, BaseException):
            known = vars(builtins).get(value.__name__) is value
            bases = [] if known else [base for base in value.__bases__ if issubclass(base, BaseException)]
            return ["X", number, str(value.__name__), _lineage(value), [self.hand_out(base) for base in bases]]
        else:
            flags += "c" if callable(value) else ""
            flags += "n" if hasattr(kind, "__next__") else ""
            flags += "b" if _base(kind) is not None else ""
        return ["h", number, str(kind.__name__)[:100], flags]

    def take_back(self, data: list) -> Any:
        tag = data[0]
        if tag == "H":
            return self.objects[data[1]]
        if tag == "B":
            return getattr(builtins, data[1])
        if tag == "cb":
            return self.callback(data[1])
        if tag == "it":
            return self.remote_iterator(data[1])
        raise wire.BrokenChannel(f"unknown tag {tag!r}")

    def callback(self, number: int) -> Any:
        def callback(*args: Any, **kwargs: Any) -> Any:
            return self.ask("call", number, args, kwargs)

        return callback

    def remote_iterator(self, number: int) -> Any:
        while True:
            try:
                item = self.ask("next", number, (), {})
            except StopIteration:
                return
            yield item

    def ask(self, what: str, number: int, args: tuple, kwargs: dict) -> Any:
        """Has the judge call one of its own functions, which this process was passed."""
        if not self.busy:
            raise RuntimeError("a function of the tests was called when no test was waiting")
        self.codec.begin()
        try:
            frame = {
                "ask": what,
                "h": number,
                "a": [self.codec.encode(arg) for arg in args],
                "k": {str(key): self.codec.encode(value) for key, value in kwargs.items()},
                "u": self.codec.changes(),
            }
            wire.send(self.sock, frame)
        except (wire.Uncrossable, wire.BrokenChannel) as error:
            self.codec.rollback()
            raise TypeError(f"the value cannot cross to the tests: {error}") from None
        self.codec.snapshot()
        while True:
            frame = wire.receive(self.sock)
            if "o" in frame:  # the judge's function needs something of ours in turn
                self.answer(frame)
                continue
            self.codec.apply(frame["u"])
            self.codec.snapshot()
            if "r" in frame:
                return self.codec.decode(frame["r"])
            if frame["x"] == "StopIteration":
                raise StopIteration
            kind = getattr(builtins, frame["x"], RuntimeError)
            raise kind(frame["m"]) if issubclass(kind, BaseException) else RuntimeError(frame["m"])

    def serve(self) -> None:
        while True:
            try:
                frame = wire.receive(self.sock)
            except EOFError:
                return
            self.answer(frame)

    def answer(self, frame: dict) -> None:
        was_busy, self.busy = self.busy, True
        if frame.get("z"):
            self.codec.drop()
        self.codec.apply(frame["u"])
        args = [self.codec.decode(arg) for arg in frame["a"]]
        kwargs = {key: self.codec.decode(value) for key, value in frame["k"].items()}
        self.codec.snapshot()
        problem: BaseException | None = None
        value = None
        try:
            value = _OPERATIONS[frame["o"]](self, *args, **kwargs)
        except BaseException as error:
            problem = error
        self.codec.begin()
        try:
            outcome = {"r": self.codec.encode(value)} if problem is None else {"x": self.exception(problem)}
            wire.send(self.sock, {**outcome, "u": self.codec.changes()})
        except (wire.Uncrossable, wire.BrokenChannel) as error:
            self.codec.rollback()
            refusal = self.exception(TypeError(f"a value that cannot cross to the tests: {error}"))
            wire.send(self.sock, {"x": refusal, "u": []})
        self.codec.snapshot()
        self.busy = was_busy

    def exception(self, error: BaseException) -> dict:
        try:
            text = str(error)[:2000]
        except BaseException:
            text = ""
        try:
            args = [self.codec.encode(arg) for arg in error.args] if len(error.args) <= 5 else None
        except BaseException:
            args = None
            self.codec.rollback()
        return {
            "k": self.hand_out(type(error)),
            "m": text,
            "a": args,
            "h": self.hand_out(error)[1],
            "d": describe(error),
        }

    # Operations

    def op_next(self, iterator: Any, count: int) -> tuple:
        """Up to `count` items, fewer if they take their time, and how it ended if it did."""
        items: list[Any] = []
        start = time.perf_counter()
        while len(items) < count and (not items or time.perf_counter() - start < 0.005):
            try:
                items.append(next(iterator))
            except StopIteration as stop:
                return tuple(items), "stop", stop.value
            except BaseException:
                if not items:
                    raise
                self.pending = sys.exc_info()[1]
                return tuple(items), "later", None
        return tuple(items), "more", None

    def op_pending(self) -> None:
        error, self.pending = self.pending, None
        if error is not None:
            raise error

    def op_base(self, value: Any) -> Any:
        base = _base(type(value))
        if base is None:
            raise TypeError(f"{type(value).__name__} has no plain value")
        return _plain_value(value, base)


def _plain_value(value: Any, base: Any) -> Any:
    """The builtin value that an instance of a derived class holds."""
    return _PLAIN_VALUE[base](value)


_PLAIN_VALUE: dict[type, Any] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    bytearray: lambda value: bytearray(memoryview(value)),
    dict: lambda value: dict(dict.items(value)),
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}


def _base(kind: type) -> Any:
    """The builtin value type that a class derives from, or `None`."""
    return next((base for base in kind.__mro__ if base in _PLAIN_VALUE), None)


def _lineage(kind: type) -> list[str]:
    return [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__ if issubclass(base, BaseException)]


def _setattr(server: Server, thing: Any, name: str, value: Any) -> None:
    setattr(thing, name, value)


def _exit(thing: Any, kind: Any, args: tuple | None) -> Any:
    """Leaves a context as after an exception of that kind, or after none."""
    if kind is None:
        return type(thing).__exit__(thing, None, None, None)
    try:
        error = kind(*(args or ()))
    except Exception:  # made of other things than a message
        error = kind.__new__(kind)
    try:
        return type(thing).__exit__(thing, kind, error, None)
    except BaseException as raised:
        if raised is error:
            return False
        raise


def _delattr(server: Server, thing: Any, name: str) -> None:
    delattr(thing, name)


_UNARY = ("neg", "pos", "abs", "invert", "index")
_BINARY = (
    "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift "
    "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift"
).split()
_OPERATIONS: dict[str, Any] = {
    "call": lambda server, function, *args, **kwargs: function(*args, **kwargs),
    "getattr": lambda server, thing, name: getattr(thing, name),
    "setattr": _setattr,
    "delattr": _delattr,
    "getitem": lambda server, thing, key: thing[key],
    "setitem": lambda server, thing, key, value: operator.setitem(thing, key, value),
    "delitem": lambda server, thing, key: operator.delitem(thing, key),
    "len": lambda server, thing: len(thing),
    "iter": lambda server, thing: iter(thing),
    "reversed": lambda server, thing: reversed(thing),
    "next": Server.op_next,
    "pending": Server.op_pending,
    "send": lambda server, thing, value: thing.send(value),
    "bool": lambda server, thing: bool(thing),
    "str": lambda server, thing: str.__str__(str(thing)),
    "repr": lambda server, thing: str.__str__(repr(thing)),
    "format": lambda server, thing, spec: str.__str__(format(thing, spec)),
    "int": lambda server, thing: int(thing),
    "float": lambda server, thing: float(thing),
    "complex": lambda server, thing: complex(thing),
    "round": lambda server, thing, *digits: round(thing, *digits),
    "enter": lambda server, thing: type(thing).__enter__(thing),
    "exit": lambda server, thing, *args: bool(_exit(thing, *args)),
    "isinstance": lambda server, thing, kind: bool(isinstance(thing, kind)),
    "issubclass": lambda server, thing, kind: bool(issubclass(thing, kind)),
    "await": lambda server, thing: _await(thing),
    "copy": lambda server, thing: copy.copy(thing),
    "deepcopy": lambda server, thing: copy.deepcopy(thing),
    "dir": lambda server, thing: dir(thing),
    "base": Server.op_base,
    **{name: lambda server, thing, name=name: getattr(operator, name)(thing) for name in _UNARY},
    **{name: lambda server, a, b, name=name: getattr(operator, name)(a, b) for name in _BINARY},
}


def _await(thing: Any) -> Any:
    import asyncio  # large, and rarely needed

    async def awaited() -> Any:
        return await thing

    return asyncio.run(awaited())


def serve_judge(control: socket.socket, payload: dict, fd: int) -> None:
    """Loads the program and answers the judge until it is done."""
    module, problem = load(payload)
    wire.send(control, {"load": problem})
    if problem is not None:
        return
    Server(socket.socket(fileno=fd), payload["exports"], module).serve()
