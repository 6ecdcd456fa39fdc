"""The program's side of a judged run: keeps the program's objects and does with them what the judge asks for.

Nothing here can be trusted once the program runs, because it shares this process. The judge gets data only.
"""

import _thread
import builtins
import importlib
import inspect
import re
import socket
import types
from typing import Any

from . import echo, special, wire
from .operations import OPERATIONS
from .plain_values import COMMON_TYPES, IMMUTABLE, PLAIN_VALUE, plain_base


_LONGEST_TEXT = 2000  # characters of an exception's text
_LONGEST_CHAIN = 16  # causes and contexts of an exception
_MOST_ARGS = 8  # of an exception
_MOST_ATTRIBUTES = 64  # of an exception


class Server:
    """
    Answers a judge's operations on the program's objects.

    Args:
        sock (`socket.socket`): The channel to the judge.
        names (`list[str]`): Names that the tests take from the program.
        module (`types.ModuleType`): The program.
        describe (`Callable`): Returns an exception's type, message and line as text.
        tape (`Tape`): Records what the program prints, warns of and logs.
    """

    def __init__(
        self, sock: socket.socket, names: list[str], module: types.ModuleType, describe: Any, tape: echo.Tape
    ):
        self.sock = sock
        self.tape = tape
        self.patched = echo.Patched()
        self.describe = describe
        self.module = module
        self.codec = wire.Codec(1, self.hand_out, self.take_back, twin=self.twin)
        # the exports have the first numbers, in order, in every process of this program
        self.objects: list[Any] = [module.__dict__.get(name) for name in names]
        self.numbers: dict[int, int] = {}
        for number, value in enumerate(self.objects):
            self.numbers.setdefault(id(value), number)
        self.known: set[int] = set()  # numbers of objects that were described to the judge
        self.told: list[int] = []  # those that the present message describes
        self.lent: dict[int, Any] = {}  # proxies for objects of the tests, by the judge's numbers
        self.borrowed: dict[int, int] = {}  # id of such a proxy -> its number
        self.both: frozenset[str] = frozenset()  # names of classes that the tests define too
        self.lock = _thread.RLock()  # of the channel: threads of the program may call functions of the tests
        self.busy = False
        self.pending: BaseException | None = None
        self.loop: Any = None
        self.codec.begin()
        hello = {name: self.codec.encode(module.__dict__[name]) for name in names if name in module.__dict__}
        self.codec.snapshot()
        own = [name for name, value in module.__dict__.items() if self.is_own_class(value, name)]
        wire.send(sock, {"exports": hello, "classes": own})

    # Objects of the program on their way out

    def hand_out(self, value: Any) -> list:
        lent = self.borrowed.get(id(value))
        if lent is not None:
            return ["mine", lent]
        kind = type(value)
        if issubclass(kind, type):
            return self.hand_out_kind(value)
        number = self.number_of(value)
        if issubclass(kind, BaseException):
            return self.hand_out_exception(value, number, 0)
        if number in self.known:
            return ["h", number]
        if kind is types.GeneratorType or kind is types.CoroutineType:
            self.tell(number)
            return ["g" if kind is types.GeneratorType else "co", number]
        base: Any = plain_base(kind)
        if base in IMMUTABLE:
            described = self.hand_out_kind(kind)  # first, because it is read first
            data = self.codec.encode(PLAIN_VALUE[base](value))
            self.tell(number)
            return ["v", number, described, data]
        described = self.hand_out_kind(kind)
        self.tell(number)
        return ["h", number, described]

    def number_of(self, value: Any) -> int:
        number = self.numbers.get(id(value))
        if number is None:
            number = self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return number

    def tell(self, number: int) -> None:
        self.known.add(number)
        self.told.append(number)

    def begin(self) -> None:
        self.told.clear()
        self.codec.begin()

    def rollback(self) -> None:
        self.known.difference_update(self.told)
        self.codec.rollback()

    def hand_out_kind(self, kind: Any) -> list:
        """Describes a class: its name, its bases, and the special methods of the class and its metaclass."""
        name: Any = wire.TYPE_NAMES.get(kind)
        if name is not None:
            return ["T", name]
        if kind in COMMON_TYPES:
            return ["P", kind.__name__]
        name = kind.__name__
        if issubclass(kind, BaseException) and vars(builtins).get(name) is kind:
            return ["B", name]
        number = self.number_of(kind)
        if number in self.known:
            return ["h", number]
        self.tell(number)
        above = [base for base in kind.__mro__ if base is not object]
        base: Any = plain_base(kind)
        own = above if base is None else above[: above.index(base)]
        own = [each for each in own if not (issubclass(each, BaseException) and each.__module__ == "builtins")]
        names = {name for each in above for name in vars(each)} & special.SPECIAL.keys()
        ours = {name for each in own for name in vars(each)} & names
        meta = [each for each in type(kind).__mro__ if each not in (type, object)]
        fields = kind.__dict__.get("_fields") if base is tuple else None
        facts = {
            "name": str(kind.__name__)[:200],
            "module": str(kind.__module__)[:200],
            "bases": [self.hand_out_kind(each) for each in kind.__bases__ if each is not object],
            "has": sorted(names),
            "own": sorted(ours),
            "meta": sorted({name for each in meta for name in vars(each)} & special.SPECIAL.keys()),
            "base": None if base is None else base.__name__,
            "fields": list(fields) if type(fields) is tuple and len(fields) <= wire.MOST_FIELDS else None,
            "unhashable": kind.__hash__ is None,
            "weak": kind.__weakrefoffset__ != 0,
            "quick": kind.__module__ in ("builtins", "itertools"),  # may be read ahead
            "checks": any("__instancecheck__" in vars(each) for each in meta if each.__module__ == "solution")
            or any("__subclasshook__" in vars(each) for each in own if each.__module__ == "solution"),
        }
        return ["K", number, facts]

    def hand_out_exception(self, error: BaseException, number: int, depth: int) -> list:
        try:
            text = str(error)[:_LONGEST_TEXT]
        except BaseException:
            text = ""
        described = self.hand_out_kind(type(error))  # everything is written in the order in which it is read
        args = OSError.__reduce__(error)[1] if isinstance(error, OSError) else error.args  # with the file's name
        written = self.attempt(args) if len(args) <= _MOST_ARGS else None
        found = list(vars(error).items())[:_MOST_ATTRIBUTES]
        if isinstance(error, (ImportError, NameError, AttributeError)) and error.name is not None:
            found.append(("name", error.name))
        attributes = {name: self.attempt(value) for name, value in found if type(name) is str}
        data = {
            "m": text,
            "a": written,
            "v": {name: value for name, value in attributes.items() if value is not None},
            "d": self.describe(error),
            "s": bool(error.__suppress_context__),
        }
        for key, other in (("c", error.__cause__), ("x", error.__context__)):
            if other is not None and depth < _LONGEST_CHAIN and id(other) not in self.borrowed:
                data[key] = self.hand_out_exception(other, self.number_of(other), depth + 1)
            elif other is not None and depth < _LONGEST_CHAIN:
                data[key] = ["mine", self.borrowed[id(other)]]
        return ["E", number, described, data]

    def attempt(self, value: Any) -> Any:
        """A value written out in a list, or `None` if it cannot cross."""
        mark = len(self.codec.fresh), len(self.told)
        try:
            return [self.codec.encode(value)]
        except (wire.Uncrossable, AttributeError, TypeError, ValueError):
            self.codec.rollback(mark[0])
            self.known.difference_update(self.told[mark[1] :])
            del self.told[mark[1] :]
            return None

    # Objects of the tests on their way in

    def take_back(self, data: list) -> Any:
        tag, number = data[0], data[1]
        if tag == "H":
            return self.objects[number]
        if tag == "B":
            return getattr(builtins, number)
        if tag == "S":
            return getattr(importlib.import_module(number), data[2])
        if number not in self.lent:
            self.lend(number, _PROXIES[tag](self, *data[1:]))
        return self.lent[number]

    def lend(self, number: int, value: Any) -> None:
        self.lent[number] = value
        self.borrowed[id(value)] = number

    def callback(self, number: int, name: str, parameters: list | None) -> Any:
        def callback(*args: Any, **kwargs: Any) -> Any:
            return self.ask("call", number, args, kwargs)

        callback.__name__ = callback.__qualname__ = name
        if parameters is not None:
            made = [
                inspect.Parameter(each, inspect._ParameterKind(kind), default=... if optional else inspect._empty)
                for each, kind, optional in parameters
            ]
            callback.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
        return callback

    def remote_iterator(self, number: int) -> Any:
        while True:
            try:
                item = self.ask("next", number, (), {})
            except StopIteration:
                return
            yield item

    def remote_object(self, number: int, name: str, names: list[str]) -> Any:
        """A proxy for an object of the tests."""

        def method(special_name: str) -> Any:
            return lambda thing, /, *args, **kwargs: self.ask(special_name, number, args, kwargs)

        def read(thing: Any, name: str) -> Any:
            if name[:1] == "_":
                raise AttributeError(f"{type(thing).__name__!r} object has no attribute {name!r}")
            return self.ask("getattr", number, (name,), {})

        def write(thing: Any, name: str, value: Any) -> None:
            self.ask("setattr", number, (name, value), {})

        space = {each: method(each) for each in names}
        return type(name, (), {**space, "__getattr__": read, "__setattr__": write, "__slots__": ("__weakref__",)})()

    def remote_kind(self, number: int, name: str, bases: list) -> Any:
        """A proxy for an exception class of the tests."""
        return type(name, tuple(self.codec.decode(base) for base in bases), {"__module__": "tests"})

    def remote_error(self, number: int, kind: Any, args: Any, text: str) -> Any:
        """A proxy for an exception of the tests."""
        kind, args = self.codec.decode(kind), self.codec.decode(args)
        error = kind.__new__(kind, *args)
        error.args = args
        return error

    # Classes that both sides define: each message copies what their instances hold

    def is_own_class(self, kind: Any, name: str) -> bool:
        return (
            type(kind) is type
            and kind.__module__ == "solution"
            and kind.__name__ == name
            and kind.__dictoffset__ != 0
            and plain_base(kind) is None
            and not issubclass(kind, BaseException)
        )

    def twin(self, name: Any) -> Any:
        """From a name to the program's class, or from a class to its name, if the tests define it too; otherwise `None`."""
        if isinstance(name, str):
            return self.module.__dict__.get(name)
        known = name.__name__ in self.both and self.module.__dict__.get(name.__name__) is name
        return name.__name__ if known else None

    # Operations

    def ask(self, what: str, number: int, args: tuple, kwargs: dict) -> Any:
        """Has the judge do something with an object of the tests, such as call a function that the program was passed."""
        with self.lock:
            if not self.busy:
                raise RuntimeError("a function of the tests was called when no test was waiting")
            self.begin()
            try:
                frame = {
                    "ask": what,
                    "h": number,
                    "u": self.codec.changes(),
                    **self.events(),
                    "a": [self.codec.encode(arg) for arg in args],
                    "k": {str(key): self.codec.encode(value) for key, value in kwargs.items()},
                }
                wire.send(self.sock, frame)
            except (wire.Uncrossable, wire.BrokenChannel) as error:
                self.rollback()
                raise TypeError(f"the value cannot be sent to the tests: {error}") from None
            self.codec.snapshot()
            while True:
                frame = wire.receive(self.sock)
                if "o" in frame:  # meanwhile the tests ask for something in turn
                    self.answer(frame)
                    continue
                self.codec.apply(frame["u"])
                self.codec.snapshot()
                if "r" in frame:
                    value = self.codec.decode(frame["r"])
                    self.codec.snapshot()
                    return value
                raise self.codec.decode(frame["x"])

    def serve(self) -> None:
        while True:
            try:
                frame = wire.receive(self.sock)
            except EOFError:
                return
            with self.lock:
                self.answer(frame)

    def answer(self, frame: dict) -> None:
        was_busy, self.busy = self.busy, True
        if frame.get("z"):
            self.codec.drop()
        if "both" in frame:
            self.both = frozenset(frame["both"])
        self.codec.apply(frame["u"])
        args = [self.codec.decode(arg) for arg in frame["a"]]
        kwargs = {key: self.codec.decode(value) for key, value in frame["k"].items()}
        if "p" in frame:
            self.patched.apply([[module, name, self.codec.decode(value)] for module, name, value in frame["p"]])
        self.codec.snapshot()
        problem: BaseException | None = None
        value = None
        if not was_busy:  # so that other threads of the program can ask meanwhile
            self.lock.release()
        try:
            value = OPERATIONS[frame["o"]](self, *args, **kwargs)
        except BaseException as error:
            problem = error
        if not was_busy:
            self.lock.acquire()
        self.begin()
        try:
            reply = {"u": self.codec.changes(), **self.events()}
            key, result = ("r", value) if problem is None else ("x", problem)
            wire.send(self.sock, {**reply, key: self.codec.encode(result)})
        except (wire.Uncrossable, wire.BrokenChannel) as error:
            self.rollback()
            wire.send(self.sock, {"u": [], "y": f"the value cannot be sent to the tests: {error}"})
        self.codec.snapshot()
        self.busy = was_busy

    def events(self) -> dict[str, list]:
        """The part of a message that tells what the program has printed, warned of and logged since the last message."""
        return {"e": self.tape.take(self.codec.encode)} if self.tape.events else {}


_PROXIES: dict[str, Any] = {
    "cb": Server.callback,
    "it": Server.remote_iterator,
    "ob": Server.remote_object,
    "re": lambda server, number, pattern, flags: re.compile(server.codec.decode(pattern), flags),
    "ek": Server.remote_kind,
    "er": Server.remote_error,
}
