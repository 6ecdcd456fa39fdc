"""The program's end of the channel to the judge: does what the tests ask of the program's objects.

The program shares this process and can change all of it. So nothing that leaves it counts for more than what a program may
say about its own objects.
"""

import _thread
import builtins
import copy
import enum
import importlib
import inspect
import operator
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

from . import output, values, wire
from .handles import ORDER, SPECIAL
from .values import IMMUTABLE, plain, plain_base


_LONGEST_TEXT = 10_000  # characters of an exception's text
_LONGEST_CHAIN = 4  # causes of an exception
_MOST_ATTRIBUTES = 64  # of an exception
_MOST_METHODS = 512  # of a class, whose names the judge is told


def _exit(thing: Any, name: str, error: BaseException | None) -> bool:
    """Calls `__exit__`, with an exception or with none; returns whether it swallows it."""
    leave = getattr(type(thing), name)
    try:
        found = leave(thing, type(error), error, error.__traceback__) if error else leave(thing, None, None, None)
        return found if name == "__aexit__" else bool(found)
    except BaseException as raised:
        if raised is error:
            return False
        raise


def _next(iterator: Any) -> tuple:
    """The next item in a tuple, which is empty at the end."""
    try:
        return (next(iterator),)
    except StopIteration:
        return ()


_loops: list[Any] = []  # the event loop of this process, once there is one


def _await(thing: Any) -> Any:
    import asyncio  # large, and rarely needed

    async def awaited() -> Any:
        return await thing

    if not _loops:
        _loops.append(asyncio.new_event_loop())
        asyncio.set_event_loop(_loops[0])
    return _loops[0].run_until_complete(awaited())


def _resume(generator: Any, sent: Any, error: BaseException | None) -> tuple:
    """Whether a generator has ended, and what it yields or returns."""
    try:
        return False, generator.send(sent) if error is None else generator.throw(error)
    except StopIteration as stop:
        return True, stop.value


def _state(thing: Any) -> dict:
    """The attributes of an object by name, those in slots included."""
    held = {}
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                held[name] = getattr(thing, name)
    return {**held, **getattr(thing, "__dict__", {})}


def _setting(name: str, value: Any) -> None:
    """Makes a setting of the tests' process in this one."""
    if name == "recursion":
        sys.setrecursionlimit(value)
    elif name == "decimal":
        decimal = importlib.import_module("decimal")
        decimal.getcontext().prec, decimal.getcontext().rounding = value
    elif name in ("random", "numpy.random"):
        importlib.import_module(name).seed(value)


def _text_of(function: Callable) -> Callable:
    return lambda *args: str.__str__(function(*args))


def _comparison(name: str) -> Callable:
    return lambda a, b: bool(getattr(operator, name)(a, b))


# What the tests can ask for beside builtin functions and operators. Arguments are objects of the program and values.
OPERATIONS: dict[str, Callable] = {
    "method": lambda thing, name, /, *args, **kwargs: getattr(thing, name)(*args, **kwargs),
    "special": lambda thing, name, /, *args: getattr(type(thing), name)(thing, *args),
    "eq": lambda a, b: bool(a == b) and not a != b,
    **{name: _comparison(name) for name in ORDER},
    **{function.__name__: _text_of(function) for function in (str, repr, format)},
    "next": _next,
    "exit": _exit,
    "await": _await,
    "resume": _resume,
    "state": _state,
    "plain": plain,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def _operation(name: str) -> Callable:
    return OPERATIONS.get(name) or getattr(builtins, name, None) or getattr(operator, f"__{name}__")


class Server:
    """
    Answers the judge.

    Args:
        sock (`socket.socket`): The channel.
        names (`list[str]`): The names that the tests take from the program.
        module (`ModuleType`): The program.
    """

    def __init__(self, sock: socket.socket, names: list[str], module: types.ModuleType):
        self.sock = sock
        self.codec = values.Codec(1, self.hand_out, self.take_in, self.keeps_class)
        # the exports have the first numbers, in order, in every process of this program
        self.objects: list[Any] = [module.__dict__.get(name) for name in names]
        self.numbers: dict[int, int] = {}
        for number, value in enumerate(self.objects):
            self.numbers.setdefault(id(value), number)
        self.named = {value for value in self.objects if isinstance(value, type)}
        self.known: set[int] = set()  # numbers of objects that were described to the judge
        self.told: list[int] = []  # those that the present message describes
        # what stands for functions, iterators and exceptions of the tests, by their numbers
        self.borrowed: dict[int, Any] = {}
        self.lenders: dict[int, int] = {}  # id of one of these -> its number
        self.lock = _thread.RLock()  # of the channel: threads of the program may call functions of the tests
        self.busy = False
        self.codec.begin()
        hello = {name: self.codec.encode(module.__dict__[name]) for name in names if name in module.__dict__}
        self.codec.snapshot()
        wire.send(sock, {"exports": hello})

    def is_named(self, kind: type) -> bool:
        """Whether the tests use a class, or one that it derives from, by name."""
        return not self.named.isdisjoint(kind.__mro__)

    def keeps_class(self, kind: type) -> bool:
        """Whether instances of a class that derives from a value type are handles: the tests use the class by name, or it
        is a class of named tuples with methods."""
        if self.is_named(kind) or not (tuple in kind.__mro__ and hasattr(kind, "_fields")):
            return self.is_named(kind)
        found = [item for each in kind.__mro__[: kind.__mro__.index(tuple)] for item in vars(each).items()]
        return any(name[0] != "_" and isinstance(value, (types.FunctionType, property)) for name, value in found)

    # Objects of the program on their way out

    def hand_out(self, value: Any) -> Any:
        number = self.lenders.get(id(value))
        if number is not None:
            return ["mine", number]
        kind = type(value)
        if issubclass(kind, type):
            return self.hand_out_class(value)
        if issubclass(kind, BaseException):
            return self.hand_out_exception(value, 0)
        number = self.numbers.get(id(value))
        if number in self.known:
            return ["h", number]
        base = plain_base(kind)
        is_member = issubclass(kind, enum.Enum)
        if base is not None and not is_member and not self.keeps_class(kind):
            return self.codec.encode(plain(value), self.codec.room)
        if kind is types.GeneratorType or kind is types.CoroutineType:  # whose classes the judge does not need
            number = self.number_of(value)
            self.tell(number)
            return ["g" if kind is types.GeneratorType else "co", number]
        described = self.describe_class(kind)
        number = self.number_of(value)
        self.tell(number)
        if base is not None and base.__name__ in IMMUTABLE:
            return ["v", number, described, self.codec.encode(plain(value), self.codec.room)]
        return ["h", number, described, self.hash_of(value)]

    def hash_of(self, value: Any) -> int | None:
        if type(value).__hash__ in (object.__hash__, None):
            return None
        try:
            return hash(value)
        except Exception:
            return None

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

    def hand_out_class(self, kind: Any) -> list:
        """Describes a class: its name, its bases, its special methods and its own methods."""
        place = values.PLACES.get(kind)
        return self.describe_class(kind) if place is None else ["S", *place]

    def describe_class(self, kind: Any) -> list:
        number = self.number_of(kind)
        if number in self.known:
            return ["h", number]
        self.tell(number)
        above = [each for each in kind.__mro__ if each is not object]
        own = {name for each in above if each.__module__ != "builtins" for name in vars(each)}
        base: Any = plain_base(kind)
        facts = {
            "name": str(kind.__name__)[:200],
            "module": str(kind.__module__)[:200],
            "bases": [self.hand_out_class(each) for each in kind.__bases__ if each is not object],
            "has": sorted({name for each in above for name in vars(each)} & SPECIAL),
            "own": sorted(own & SPECIAL),
            "base": None if base is None else base.__name__,
            "unhashable": kind.__hash__ is None,
            "weak": kind.__weakrefoffset__ != 0,
            "methods": self.methods_of(above) if type(kind).__getattribute__ is type.__getattribute__ else [],
        }
        return ["K", number, facts]

    def methods_of(self, above: list[type]) -> list[str]:
        if any("__getattribute__" in vars(each) for each in above if each.__module__ != "builtins"):
            return []
        found: dict[str, Any] = {}
        for each in reversed(above):
            found |= vars(each)
        plainly = [name for name, value in found.items() if type(value) is types.FunctionType and name[:2] != "__"]
        return plainly[:_MOST_METHODS]

    def hand_out_exception(self, error: BaseException, depth: int) -> list:
        try:
            text = str(error)[:_LONGEST_TEXT]
        except BaseException:
            text = ""
        if id(error) in self.lenders:
            return ["mine", self.lenders[id(error)]]
        args = OSError.__reduce__(error)[1] if isinstance(error, OSError) else error.args  # with the file's name
        # everything is written in the order in which it is read
        kind, args_written = self.exception_class(type(error)), self.attempt(args)
        attributes = self.constants_of(type(error)) | vars(error)
        if isinstance(error, (ImportError, NameError, AttributeError)) and error.name is not None:
            attributes["name"] = error.name
        written = [[name, self.attempt(value)] for name, value in list(attributes.items())[:_MOST_ATTRIBUTES]]
        data = {
            "k": kind,
            "m": text,
            "a": args_written,
            "v": [attribute for attribute in written if attribute[1] is not None],
            "s": bool(error.__suppress_context__),
            "d": output.describe(error),
        }
        for key, other in (("x", error.__context__), ("c", error.__cause__)):
            if other is not None and depth < _LONGEST_CHAIN:
                data[key] = self.hand_out_exception(other, depth + 1)
        return ["E", data]

    def constants_of(self, kind: type) -> dict[str, Any]:
        """Attributes of the program's classes of exceptions that are plain values."""
        own = [each for each in reversed(kind.__mro__) if each.__module__ == "solution"]
        return {
            name: value
            for each in own
            for name, value in vars(each).items()
            if name[:2] != "__" and type(value) in (int, float, str, bool, tuple, list, dict)
        }

    def exception_class(self, kind: type) -> list:
        """A class of exceptions, by its place in the standard library, or by a description."""
        if kind.__module__ in sys.stdlib_module_names or kind.__module__.partition(".")[0] in sys.stdlib_module_names:
            if vars(sys.modules.get(kind.__module__, builtins)).get(kind.__name__) is kind:
                return ["S", kind.__module__, kind.__name__]
        return self.hand_out_class(kind)

    def attempt(self, value: Any) -> Any:
        """A value written out in a list, or `None` if it cannot cross."""
        mark = len(self.codec.fresh), len(self.told)
        try:
            return [self.codec.encode(value, self.codec.room)]
        except (values.Uncrossable, AttributeError, TypeError, ValueError):
            self.codec.rollback(mark[0])
            self.known.difference_update(self.told[mark[1] :])
            del self.told[mark[1] :]
            return None

    # Objects of the tests on their way in

    def take_in(self, data: list) -> Any:
        tag, number = data[0], data[1]
        if tag == "H":
            return self.objects[number]
        if tag == "M":
            return getattr(self.objects[number], data[2])
        if tag == "S":
            return values.TYPES.get((number, data[2])) or getattr(importlib.import_module(number), data[2])
        if number not in self.borrowed:
            made = _BORROWED[tag](self, *data[1:])
            self.borrowed[number] = made
            self.lenders[id(made)] = number
        return self.borrowed[number]

    def callback(self, number: int, name: str, parameters: list | None) -> Callable:
        def callback(*args: Any, **kwargs: Any) -> Any:
            return self.ask(number, args, kwargs)

        callback.__name__ = callback.__qualname__ = name
        if parameters is not None:
            made = [
                inspect.Parameter(
                    each, inspect._ParameterKind(kind), default=... if optional else inspect.Parameter.empty
                )
                for each, kind, optional in parameters
            ]
            callback.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
        return callback

    def iterator(self, number: int) -> Any:
        while True:
            try:
                item = self.ask(number, (), {})
            except StopIteration:
                return
            yield item

    def error(self, number: int, base: Any, name: str, args: Any) -> BaseException:
        """An exception of the tests; `base` is the class that it derives from, `name` that of its own class."""
        base, args = self.codec.decode(base), self.codec.decode(args)
        kind = base if name == base.__name__ else type(name, (base,), {"__module__": "tests"})
        found = kind.__new__(kind, *args)
        found.args = args
        return found

    # Operations

    def ask(self, number: int, args: tuple, kwargs: dict) -> Any:
        """Calls a function of the tests."""
        with self.lock:
            if not self.busy:
                raise RuntimeError("a function of the tests was called when no test was waiting")
            self.begin()
            try:
                frame = {
                    "ask": number,
                    "u": self.codec.changes(),
                    "p": output.recorder.take(),
                    "a": [self.codec.encode(arg) for arg in args],
                    "k": {str(key): self.codec.encode(value) for key, value in kwargs.items()},
                }
                wire.send(self.sock, frame)
            except (values.Uncrossable, wire.BrokenChannel) as error:
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
                if "stop" in frame:
                    raise StopIteration
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
        self.codec.drop(frame.get("z", ()))
        self.codec.apply(frame["u"])
        args = [self.codec.decode(arg) for arg in frame["a"]]
        kwargs = {key: self.codec.decode(value) for key, value in frame.get("k", {}).items()}
        self.codec.snapshot()
        problem: BaseException | None = None
        value = None
        if not was_busy:  # so that other threads of the program can ask meanwhile
            self.lock.release()
        try:
            for setting in frame.get("set", ()):
                _setting(*setting)
            value = _operation(frame["o"])(*args, **kwargs)
        except BaseException as error:
            problem = error
        if not was_busy:
            self.lock.acquire()
        self.begin()
        try:
            reply = {"u": self.codec.changes(), "p": output.recorder.take()}
            if problem is None:
                reply["r"] = self.codec.encode(value)
            else:
                reply["x"] = self.hand_out_exception(problem, 0)
            wire.send(self.sock, reply)
        except (values.Uncrossable, wire.BrokenChannel) as error:
            self.rollback()
            wire.send(self.sock, {"u": [], "p": [], "y": f"the value cannot be sent to the tests: {error}"})
        self.codec.snapshot()
        self.busy = was_busy


_BORROWED: dict[str, Callable] = {"cb": Server.callback, "it": Server.iterator, "er": Server.error}
