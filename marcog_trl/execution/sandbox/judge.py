"""The judge's side: runs the tests, against stand-ins for the program's objects. Never runs a line of the program.

An object of the program can be called, indexed, iterated and asked for attributes, but never compared: what compares true
is decided here, between plain values. So no operator passes an expected value to the program, and none takes its word.
"""

import _thread
import ast
import builtins
import importlib.util
import operator
import reprlib
import socket
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from . import assertions, cases, wire
from .solution import _BINARY, _PLAIN_VALUE, describe


_MODULES = ("builtins", "decimal", "json.decoder", "statistics", "zlib", "binascii", "struct", "re", "copy", "queue")
_MOST_KEPT = 256  # nodes after which both sides forget them all


class SolutionGone(BaseException):
    """The program's process has ended or broke the channel."""


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = 12
        self.maxstring = self.maxother = self.maxlong = 120

    def repr1(self, value: Any, level: int) -> str:
        try:
            return super().repr1(value, level)
        except ValueError:  # an int too long for decimal digits
            return f"<{type(value).__name__}>"


shorten = _Repr().repr


class Session:
    """The channel to the solution process and the stand-ins for its objects."""

    def __init__(self, names: list[str]):
        self.names = names
        self.dead = True
        self.refuted: AssertionError | None = None  # of a function of the tests, called by the program
        self.generation = 0
        self.asked = 0  # times that the program was asked for something
        self.callables: list[Any] = []
        self.stand_ins: dict[int, Any] = {}
        self.kinds: dict[int, type] = {}
        self.lock = _thread.RLock()

    def attach(self, sock: socket.socket) -> dict[str, Any]:
        """Talks to a fresh process from now on; returns what it exports, by name."""
        self.sock = sock
        self.generation += 1
        self.codec = wire.Codec(0, self.hand_over, self.stand_in)
        # the exports have the same numbers in every process of the program, and the tests hold their stand-ins
        count = len(self.names)
        self.stand_ins = {number: made for number, made in self.stand_ins.items() if number < count}
        self.kinds = {number: kind for number, kind in self.kinds.items() if number < count}
        self.dead = False
        frame = self.receive()
        try:
            exports = {
                name: self.codec.decode(frame["exports"][name]) for name in self.names if name in frame["exports"]
            }
        except (wire.BrokenChannel, TypeError, KeyError) as error:
            raise self.lost(error) from None
        self.codec.snapshot()
        return exports

    def lost(self, error: BaseException) -> SolutionGone:
        self.dead = True
        return SolutionGone(str(error))

    def receive(self) -> dict:
        try:
            frame = wire.receive(self.sock)
        except (EOFError, OSError, wire.BrokenChannel) as error:
            raise self.lost(error) from None
        if type(frame) is not dict:
            raise self.lost(wire.BrokenChannel("not a message"))
        return frame

    # Values of ours on their way out

    def hand_over(self, value: Any) -> list:
        if isinstance(value, Foreign):
            if _generation(value) not in (self.generation, None):
                raise wire.Uncrossable("an object of the program's earlier process, which has ended")
            return ["H", _number(value)]
        kind = self.number_of(value)
        if kind is not None:
            return ["H", kind]
        if isinstance(value, (type, types.BuiltinFunctionType)):
            name = value.__name__
            if vars(builtins).get(name) is value:
                return ["B", name]
        if callable(value):
            self.callables.append(value)
            return ["cb", len(self.callables) - 1]
        if isinstance(value, Iterator):
            self.callables.append(value)
            return ["it", len(self.callables) - 1]
        raise wire.Uncrossable(f"an object of type {type(value).__name__}, which is not the program's")

    def number_of(self, value: Any) -> int | None:
        return next((number for number, kind in self.kinds.items() if kind is value), None)

    # Values of theirs on their way in

    def stand_in(self, data: list) -> Any:
        tag, number = data[0], data[1]
        if type(number) is not int or number < 0:
            raise wire.BrokenChannel("a malformed handle")
        if number in self.stand_ins:
            return self.stand_ins[number]
        generation = None if number < len(self.names) else self.generation
        if tag == "X":
            made: Any = self.exception_kind(number, data[2], data[3], data[4])
        elif tag == "h":
            made = self.make(number, generation, data[2], data[3])
        else:
            raise wire.BrokenChannel(f"unknown tag {tag!r}")
        self.stand_ins[number] = made
        return made

    def make(self, number: int, generation: int | None, name: str, flags: str) -> Any:
        if type(name) is not str or type(flags) is not str:
            raise wire.BrokenChannel("a malformed handle")
        if flags == "g":
            return _generator(Foreign(self, number, generation, name))
        if flags == "o":
            return _coroutine(Foreign(self, number, generation, name))
        kind = Foreign
        if "b" in flags:
            kind = ForeignValue
        elif "c" in flags:
            kind = ForeignCallable
        elif "n" in flags:
            kind = ForeignIterator
        return kind(self, number, generation, name)

    def exception_kind(self, number: int, name: str, lineage: list[str], bases: list) -> type:
        base = _known_exception(lineage)
        if f"{base.__module__}.{base.__qualname__}" == lineage[0]:
            self.kinds[number] = base
            return base
        kinds = tuple(kind for kind in map(self.stand_in, bases) if isinstance(kind, type)) or (base,)

        def __getattr__(error: Any, attribute: str) -> Any:
            remote = error.__dict__.get("__remote__")
            if remote is None:
                raise AttributeError(attribute)
            return getattr(remote, attribute)

        kind = type(str(name), kinds, {"__module__": "solution", "__getattr__": __getattr__})
        self.kinds[number] = kind
        return kind

    # Operations

    def ask(self, what: str, *args: Any, **kwargs: Any) -> Any:
        """Has the solution process do something with its objects; returns what it returned or raises what it raised."""
        with self.lock:
            return self._ask(what, args, kwargs)

    def _ask(self, what: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.dead:
            raise SolutionGone("the program's process has ended")
        self.asked += 1
        codec = self.codec
        forget = len(codec.nodes) > _MOST_KEPT
        if forget:
            codec.drop()
        codec.begin()
        try:
            frame = {
                "o": what,
                "a": [codec.encode(arg) for arg in args],
                "k": {key: codec.encode(value) for key, value in kwargs.items()},
                "u": codec.changes(),
                "z": forget,
            }
            self.send(frame)
        except wire.Uncrossable as error:
            codec.rollback()
            raise TypeError(f"cannot pass {error} to the program") from None
        codec.snapshot()
        while True:
            reply = self.receive()
            try:
                codec.apply(reply["u"])
                codec.snapshot()
                if "ask" in reply:
                    self.send(self.oblige(reply))
                    continue
                if "x" not in reply:
                    value = codec.decode(reply["r"])
                    codec.snapshot()
                    return value
                raised = self.exception(reply["x"])
            except (wire.BrokenChannel, KeyError, TypeError, IndexError, ValueError, AttributeError) as problem:
                raise self.lost(problem) from None
            raise raised

    def send(self, frame: dict) -> None:
        try:
            wire.send(self.sock, frame)
        except wire.BrokenChannel as error:
            raise wire.Uncrossable(str(error)) from None
        except OSError as error:
            raise self.lost(error) from None

    def oblige(self, reply: dict) -> dict:
        """Calls one of the tests' own functions on the program's behalf."""
        function = self.callables[reply["h"]]
        args = [self.codec.decode(arg) for arg in reply["a"]]
        kwargs = {key: self.codec.decode(value) for key, value in reply["k"].items()}
        self.codec.snapshot()
        self.codec.begin()
        try:
            value = next(function) if reply["ask"] == "next" else function(*args, **kwargs)
            self.codec.begin()
            return {"r": self.codec.encode(value), "u": self.codec.changes()}
        except SolutionGone:
            raise
        except AssertionError as error:
            self.refuted = error  # whatever the program makes of it
            return {"x": "AssertionError", "m": "", "u": []}
        except wire.Uncrossable as error:
            self.codec.rollback()
            return {"x": "TypeError", "m": f"the value cannot cross: {error}", "u": []}
        except Exception as error:
            return {"x": type(error).__name__, "m": str(error)[:2000], "u": []}
        finally:
            self.codec.snapshot()

    def exception(self, data: dict) -> BaseException:
        """An exception of ours like the one that the program raised."""
        kind = self.stand_in(data["k"])
        if not isinstance(kind, type):
            raise wire.BrokenChannel("an exception of no kind")
        args = None if data["a"] is None else tuple(self.codec.decode(arg) for arg in data["a"])
        self.codec.snapshot()
        message = str(data["m"])
        error = _make(kind, args if args is not None else (message,)) or Exception(message)
        error.__dict__["__solution__"] = str(data["d"])[:500]
        if kind.__module__ == "solution":
            error.__dict__["__remote__"] = Foreign(self, data["h"], self.generation, kind.__name__)
        return error


def _make(kind: type[BaseException], args: tuple) -> BaseException | None:
    try:
        return kind(*args)
    except Exception:
        pass
    try:
        error = kind.__new__(kind)
    except Exception:
        return None
    error.args = args  # a kind that is made of other things than it keeps
    return error


def _known_exception(lineage: list[str]) -> type[BaseException]:
    """The nearest ancestor among the exceptions of the standard library."""
    for name in lineage:
        module, _, kind = str(name).rpartition(".")
        if module in _MODULES and module in sys.modules:
            found = getattr(sys.modules[module], kind, None)
            if isinstance(found, type) and issubclass(found, BaseException):
                return found
    return Exception


# Stand-ins


def _number(thing: "Foreign") -> int:
    return object.__getattribute__(thing, "_number")


def _generation(thing: "Foreign") -> int | None:
    return object.__getattribute__(thing, "_generation")


def _ask(thing: "Foreign", what: str, *args: Any, **kwargs: Any) -> Any:
    return object.__getattribute__(thing, "_session").ask(what, thing, *args, **kwargs)


_OPEN_DUNDERS = frozenset("__name__ __qualname__ __module__ __doc__ __dict__ __annotations__ __version__".split())


class Foreign:
    """An object of the program. Equal to itself and to nothing else."""

    __slots__ = ("__weakref__", "_generation", "_kind", "_number", "_session")

    def __init__(self, session: Session, number: int, generation: int | None, kind: str):
        for name, value in (("_session", session), ("_number", number), ("_generation", generation), ("_kind", kind)):
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return _number(self)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" and name not in _OPEN_DUNDERS:  # hooks by which libraries would trust an object's word
            raise AttributeError(f"{name} of the program's objects is out of reach")
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delattr", name)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        _ask(self, "delitem", key)

    def __len__(self) -> int:
        return _ask(self, "len")

    def __bool__(self) -> bool:
        return _ask(self, "bool") is True

    def __iter__(self) -> Any:
        return iter(_ask(self, "iter"))

    def __reversed__(self) -> Any:
        return iter(_ask(self, "reversed"))

    def __contains__(self, value: Any) -> bool:
        return any(item is value or item == value for item in self)

    def __str__(self) -> str:
        return _exact(_ask(self, "str"), str)

    def __repr__(self) -> str:
        return _exact(_ask(self, "repr"), str)

    def __format__(self, spec: str) -> str:
        return _exact(_ask(self, "format", spec), str)

    def __int__(self) -> int:
        return _exact(_ask(self, "int"), int)

    def __index__(self) -> int:
        return _exact(_ask(self, "index"), int)

    def __float__(self) -> float:
        return _exact(_ask(self, "float"), float)

    def __complex__(self) -> complex:
        return _exact(_ask(self, "complex"), complex)

    def __round__(self, *digits: int) -> Any:
        return _ask(self, "round", *digits)

    def __neg__(self) -> Any:
        return _ask(self, "neg")

    def __pos__(self) -> Any:
        return _ask(self, "pos")

    def __abs__(self) -> Any:
        return _ask(self, "abs")

    def __invert__(self) -> Any:
        return _ask(self, "invert")

    def __enter__(self) -> Any:
        return _ask(self, "enter")

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool:
        if kind is None or issubclass(kind, AssertionError):  # a test that fails is not the program's to excuse
            _ask(self, "exit", None, None)
            return False
        session = object.__getattribute__(self, "_session")
        known = next(
            base
            for base in kind.__mro__
            if vars(builtins).get(base.__name__) is base or session.number_of(base) is not None
        )
        return _ask(self, "exit", known, (str(value),)) is True

    def __await__(self) -> Any:
        return _coroutine(self).__await__()

    def __copy__(self) -> Any:
        return _ask(self, "copy")

    def __deepcopy__(self, memo: Any) -> Any:
        return _ask(self, "deepcopy")

    def __instancecheck__(self, thing: Any) -> bool:
        return isinstance(thing, Foreign) and _ask(thing, "isinstance", self) is True

    def __subclasscheck__(self, kind: Any) -> bool:
        return isinstance(kind, Foreign) and _ask(kind, "issubclass", self) is True

    def __dir__(self) -> list[str]:
        return _exact(_ask(self, "dir"), list)


def _exact(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"the program's object gave {type(value).__name__}, not {kind.__name__}")
    return value


def _binary(name: str) -> Callable:
    def method(self: Foreign, other: Any) -> Any:
        if not isinstance(other, Foreign):  # it may be what is expected: that is not the program's business
            raise TypeError(
                f"{_kind(self)} of the program cannot be combined with {type(other).__name__} of the tests"
            )
        return _ask(self, name, other)

    return method


def _kind(thing: Foreign) -> str:
    return object.__getattribute__(thing, "_kind")


def _comparison(symbol: str) -> Callable:
    def method(self: Foreign, other: Any) -> Any:
        raise TypeError(
            f"objects of the program ({_kind(self)}) are not compared by {symbol}: their word is not taken"
        )

    return method


def _doc(thing: Foreign) -> Any:
    return _ask(thing, "getattr", "__doc__")


for _name in _BINARY:
    setattr(Foreign, f"__{_name.rstrip('_')}__", _binary(_name))
for _name, _symbol in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
    setattr(Foreign, f"__{_name}__", _comparison(_symbol))


class ForeignCallable(Foreign):
    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return object.__getattribute__(self, "_session").ask("call", self, *args, **kwargs)


class ForeignIterator(Foreign):
    __slots__ = ("_batch",)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        try:
            batch = object.__getattribute__(self, "_batch")
        except AttributeError:
            batch = _batches(self)
            object.__setattr__(self, "_batch", batch)
        return next(batch)


class ForeignValue(ForeignCallable):
    """An object of a class that derives from a builtin value: compares and computes as that value, here. It is asked for
    that value once, unless it is one that can change."""

    __slots__ = ("_value",)

    def __eq__(self, other: object) -> bool:
        return self is other or bool(_base(self) == _base(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_base(self))

    def __contains__(self, value: Any) -> bool:
        return value in _base(self)

    def __float__(self) -> float:
        return float(_base(self))

    def __int__(self) -> int:
        return int(_base(self))

    def __index__(self) -> int:
        return operator.index(_base(self))


for _kind_of_stand_in in (Foreign, ForeignCallable, ForeignIterator, ForeignValue):
    _kind_of_stand_in.__doc__ = property(_doc)  # type: ignore[assignment]


def _base(thing: Any) -> Any:
    if type(thing) is not ForeignValue:
        return thing
    try:
        return object.__getattribute__(thing, "_value")
    except AttributeError:
        value = _ask(thing, "base")
    if type(value) not in _PLAIN_VALUE:
        raise TypeError(f"{_kind(thing)} of the program has no plain value")
    if type(value) in (int, float, complex, str, bytes, tuple, frozenset):
        object.__setattr__(thing, "_value", value)
    return value


def _on_base(name: str) -> tuple[Callable, Callable]:
    function = getattr(operator, name)

    def forward(self: Any, other: Any) -> Any:
        return function(_base(self), _base(other))

    def reflected(self: Any, other: Any) -> Any:
        return function(_base(other), _base(self))

    return forward, reflected


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"):
    _forward, _reflected = _on_base(_name)
    setattr(ForeignValue, f"__{_name.rstrip('_')}__", _forward)
    setattr(ForeignValue, f"__r{_name.rstrip('_')}__", _reflected)
for _name in ("lt", "le", "gt", "ge"):
    setattr(ForeignValue, f"__{_name}__", _on_base(_name)[0])


def _batches(iterator: Foreign) -> Any:
    """Items of a remote iterator, first one by one, then several at a time."""
    count, taken = 1, 0
    while True:
        batch = _ask(iterator, "next", count)
        items, end, value = batch
        yield from items
        if end == "stop":
            return value
        if end == "later":
            _ask(iterator, "pending")
        taken += len(items)
        count = 1 if taken < 16 else min(256, taken)


def _generator(thing: Foreign) -> Any:
    def generator() -> Any:
        return (yield from _sendable(thing))

    return generator()


def _sendable(thing: Foreign) -> Any:
    batches = _batches(thing)
    sent = None
    while True:
        try:
            item = next(batches) if sent is None else _ask(thing, "send", sent)
        except StopIteration as stop:
            return stop.value
        sent = yield item


def _coroutine(thing: Foreign) -> Any:
    async def coroutine() -> Any:
        return _ask(thing, "await")

    return coroutine()


# Running the tests


class Mismatch(str):
    """The message of a comparison that does not hold."""

    __slots__ = ()


def mismatch(left: Any, symbol: str, right: Any) -> Mismatch:
    try:
        text = f"{shorten(left)} {symbol} {shorten(right)} does not hold"
        objects = [value for value in (left, right) if isinstance(value, Foreign) and type(value) is not ForeignValue]
        if objects:
            text += f" (an object of the program, of type {_kind(objects[0])}, equals only itself)"
        return Mismatch(text)
    except SolutionGone:
        raise
    except Exception as error:
        return Mismatch(f"{type(error).__name__} while describing a value")


class Judge:
    """Runs the same tests on one program after another, and reports on each test. Programs share nothing but the modules
    that the tests import."""

    def __init__(self, control: socket.socket, payload: dict):
        self.control = control
        self.payload = payload
        self.codes: dict[Any, types.CodeType] = {}

    def report(
        self, index: int | None, status: str, message: str = "", raised: bool = False, again: bool = False
    ) -> None:
        wire.send(self.control, {"t": index, "s": status, "m": message[:1000], "r": raised, "again": again})

    def begin(self) -> None:
        """What tests that leave nothing else may leave for the next program: names, random numbers, settings."""
        import decimal
        import random

        # as fixed as the tests, and unknown to the program
        random.seed(repr(self.payload["tests"]))
        decimal.setcontext(decimal.Context())
        module = types.ModuleType("tests")
        self.space: dict[str, Any] = module.__dict__
        self.space.update({"__builtins__": builtins, "__mismatch__": mismatch, assertions.RECORD: self.record})
        sys.modules["tests"] = module
        self.session = Session(self.payload["exports"])

    def run(self, fd: int | None) -> bool:
        """Runs the tests on the program behind `fd`; returns whether it may be done again."""
        self.begin()
        try:
            exports = {} if fd is None else self.session.attach(socket.socket(fileno=fd))
            self.session.dead = False
            self.exports = exports
            self.space.update(exports)
            for name, source in self.payload["modules"]:
                if source in sys.modules or importlib.util.find_spec(source):
                    self.space[name] = importlib.import_module(source)
            exec(self.compiled("setup", lambda: self.payload["setup"]), self.space)
            getattr(self, self.payload["format"])(exports)
            if self.session.refuted is not None:  # outside of any test, or after the last one
                raise self.session.refuted
            status, message, raised = "gone" if self.session.dead else "done", "", False
        except SolutionGone:
            status, message, raised = "gone", "", False
        except BaseException as error:
            status, message = "raised", self.describe(error)
            raised = self.session.refuted is None and self.is_of_program(error)
        # a thread of the tests would go on under the next program
        again = fd is not None and not self.session.dead and not _thread._count()
        self.report(None, status, message, raised, again)
        return again

    def compiled(self, key: Any, source: Callable[[], Any]) -> types.CodeType:
        if key not in self.codes:
            self.codes[key] = compile(source(), "<setup>" if key == "setup" else "<tests>", "exec")
        return self.codes[key]

    def asserts(self, exports: dict[str, Any]) -> None:
        self.restore(exports)
        for index, source in enumerate(self.payload["tests"]):
            with self.record(index):
                exec(self.compiled(index, lambda: assertions.explained(ast.parse(source))), self.space)  # noqa: B023

    def check(self, exports: dict[str, Any]) -> None:
        exec(self.compiled("tests", self.instrumented), self.space)
        candidate = exports[self.payload["entry_point"]]
        if self.count:
            self.space["check"](candidate)
            return
        with self.record(0):
            self.space["check"](candidate)

    def instrumented(self) -> ast.Module:
        tree = ast.parse(self.payload["tests"])
        function = assertions.check_function(tree)
        assert function is not None
        self.count = assertions.instrument(tree, function)
        return tree

    def unittest(self, exports: dict[str, Any]) -> None:
        exec(self.compiled("tests", lambda: self.payload["tests"]), self.space)
        self.restore(exports)
        tests = cases.tests_of(sys.modules["tests"])
        if not tests:
            raise cases.NotRun("the tests have no test method")
        if len(tests) != len(self.payload["names"]):
            wire.send(self.control, {"count": len(tests)})
        cases.run(tests, self.record, lambda: (self.session.generation, self.session.asked), self.fail)

    def fail(self, index: int, error: BaseException) -> None:
        self.report(index, "failed", self.describe(error), self.is_of_program(error))

    def outputs(self, exports: dict[str, Any]) -> None:
        for index, (stdin, expected, output) in enumerate(self.payload["tests"]):
            with self.record(index):
                if not self.space["check_output"](stdin, expected, output):
                    raise AssertionError(f"check_output refused {shorten(output)}")

    def restore(self, exports: dict[str, Any]) -> None:
        """The entry point is the program's, whatever the setup defined."""
        name = self.payload["entry_point"]
        if name in exports:
            self.space[name] = exports[name]

    def record(self, index: int) -> "Record":
        return Record(self, index)

    def describe(self, error: BaseException) -> str:
        if isinstance(error, AssertionError) and len(error.args) == 1 and type(error.args[0]) is Mismatch:
            return "AssertionError: " + str.__str__(error.args[0])
        raised = error.__dict__.get("__solution__") if hasattr(error, "__dict__") else None
        return raised or describe(error, "<tests>")

    def is_of_program(self, error: BaseException) -> bool:
        """Whether an exception came out of the program, or of a name that the program should define."""
        return "__solution__" in error.__dict__ or (
            isinstance(error, NameError) and error.name in self.payload["exports"]
        )

    def replace(self) -> None:
        """Waits for a fresh process of the program after one has ended."""
        while True:
            message, fds, _, _ = socket.recv_fds(self.control, 1, 1)
            if not message:
                raise SystemExit
            try:
                self.renew(self.session.attach(socket.socket(fileno=fds[0])))
                return
            except SolutionGone:
                self.report(None, "gone")

    def renew(self, exports: dict[str, Any]) -> None:
        """Puts the fresh process's containers in place of those of the process that has ended, where the tests still have
        them under the program's names. Stand-ins and constants stay as they are; a name that the tests have bound, also by
        `import *`, is not the program's any more."""
        for name, before in self.exports.items():
            if name in exports and type(before) in wire.NODES and self.space.get(name) is before:
                self.space[name] = self.exports[name] = exports[name]


class Record:
    """Reports what became of the test inside it, and goes on with the next."""

    __slots__ = ("index", "judge")

    def __init__(self, judge: Judge, index: int):
        self.judge = judge
        self.index = index

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        judge = self.judge
        refuted, judge.session.refuted = judge.session.refuted, None
        error = error or refuted
        if judge.session.dead:  # whatever the test made of it
            judge.report(self.index, "gone")
            judge.replace()
        elif error is None:
            judge.report(self.index, "passed")
        elif isinstance(error, cases.LeftOut) and refuted is None:
            judge.report(self.index, "left out", str(error))
        else:
            raised = refuted is None and judge.is_of_program(error)
            judge.report(self.index, "failed", judge.describe(error), raised)
        return True


def serve(control: socket.socket, payload: dict, fd: int | None) -> None:
    """Runs the tests of a payload against the solution process behind `fd`, and those that come after it."""
    judge = Judge(control, payload)
    while judge.run(fd):
        judge.session.sock.close()
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        fd = fds[0]
