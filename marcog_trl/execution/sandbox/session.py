"""The judge's channel to the program's process: what the tests ask of the program's objects, and the answers."""

import _thread
import builtins
import importlib
import inspect
import resource
import socket
import sys
import types
from typing import Any

from . import handles, output, values, wire


class SolutionGone(BaseException):
    """The program's process has ended or broke the channel."""


class ProgramStopped(Exception):
    """The program raised an exception that would end a loop of the tests."""


_MALFORMED = (wire.BrokenChannel, KeyError, TypeError, IndexError, ValueError, AttributeError, RecursionError)
_PLAIN = frozenset((int, float, str, bytes, bool, type(None)))
_MOST_TOLD = 64  # items of an argument that are remembered as shown to the program
_CATCH_ALL = (Exception, BaseException, AssertionError)
_MOST_SAID = 64  # exceptions of the program to remember
_STACK = 64 << 20  # bytes; the kernel keeps 128 MiB free for a stack to grow
_LEVEL = 4096  # bytes of the stack that a level of recursion takes at most
_MOST_COMPARED = 1000  # pairs of objects in one comparison
# modules whose exceptions control a test run. If a program raises one, it has failed and nothing else happens.
_CONTROLLING = frozenset(("unittest", "doctest", "bdb", "pdb"))
# exceptions that an operation may end a loop with
_ENDS: dict[str, Any] = {"getitem": IndexError, "await": StopAsyncIteration}
# operations that change nothing in the program
_LOOKS = frozenset("iter next len bool getitem contains getattr hasattr str repr format eq state plain dir".split())


class Session:
    """
    The channel to the solution process.

    Args:
        names (`list[str]`): Names that the tests take from the program.
    """

    def __init__(self, names: list[str]):
        self.names = names
        self.dead = True
        self.refuted: BaseException | None = None  # why the present test cannot pass, even if it succeeds
        self.generation = 0  # number of the program's present process
        self.asked = 0  # how often the program was asked for something
        self.changes = 0  # how often it may have changed something
        self.named: set[type] = set()  # classes of the program that the tests use by name
        self.handles: dict[int, Any] = {}  # by the number of the object
        self.numbers: dict[int, int] = {}  # id of a handle -> number
        self.lost: list[Any] = []  # handles for objects of processes that have ended
        self.said: dict[int, tuple[Any, str]] = {}  # id of an exception -> it, and how the program describes it
        self.lent: list[Any] = []  # functions, iterators and exceptions of the tests that the program was passed
        self.lent_numbers: dict[int, int] = {}
        self.told: set[Any] = set()  # plain values that the program was shown
        self.lock = _thread.RLock()
        self.talking = False
        self.unclosed: list[int] = []  # generators to close before the next request
        self.settings: dict[str, Any] = settings()
        handles.session = self

    def attach(self, sock: socket.socket) -> dict[str, Any]:
        """Talks to a fresh process from now on; returns what it exports, by name."""
        self.sock = sock
        self.codec = values.Codec(0, self.hand_over, self.special, lambda kind: type(kind) is handles.HandleType)
        self.generation += 1
        self.lost += [thing for number, thing in self.handles.items() if number >= len(self.names)]
        self.handles = {number: thing for number, thing in self.handles.items() if number < len(self.names)}
        self.numbers = {id(thing): number for number, thing in self.handles.items()}
        self.unclosed.clear()
        self.talking = False
        self.dropped: list[int] = []  # nodes that the program does not know to be forgotten
        self.sent_settings: dict[str, Any] = dict(self.settings)
        self.dead = False
        frame = self.receive()
        exports: dict[str, Any] = {}
        for name in self.names:
            try:
                if name in frame["exports"]:
                    exports[name] = self.codec.decode(frame["exports"][name])
            except _MALFORMED as error:
                raise self.gone(error) from None
            if self.refuted is not None:  # the tests may not have it
                self.refuted = None
                del exports[name]
        self.codec.snapshot()
        self.named |= {value for value in exports.values() if type(value) is handles.HandleType}
        return exports

    def gone(self, error: BaseException) -> SolutionGone:
        self.dead = True
        return SolutionGone(str(error))

    def doubt(self, text: str) -> TypeError:
        """Records that the present test cannot be judged, so that it does not pass; returns an error that says why."""
        error = TypeError(text)
        if self.refuted is None:
            self.refuted = error
        return error

    def is_handle(self, thing: Any) -> bool:
        return isinstance(type(thing), handles.HandleType) or type(thing) is handles.HandleType

    def is_named(self, thing: Any) -> bool:
        """Whether an object's class, or one that it derives from, is used by the tests by name."""
        return not self.named.isdisjoint(type(thing).__mro__)

    def was_told(self, value: Any) -> bool:
        """Whether the program was shown this plain value."""
        return type(value) in _PLAIN and value in self.told

    def tell(self, shown: Any) -> None:
        for value in shown:
            if type(value) in _PLAIN:
                self.told.add(value)
            elif type(value) in (list, tuple, set, dict) and len(value) <= _MOST_TOLD:
                self.told.update(item for item in value if type(item) in _PLAIN)

    # Objects on their way to the program

    def hand_over(self, value: Any) -> list:
        """A value of no plain type as tagged JSON; raises Uncrossable."""
        number = self.numbers.get(id(value))
        if number is not None:
            return ["H", number]
        kind = type(value)
        if kind is handles.Method:
            return ["M", *self.hand_over(value.thing)[1:], value.name]
        if self.is_handle(value) and not isinstance(value, BaseException):
            raise values.Uncrossable("an object of the program's earlier process, which has ended")
        if isinstance(value, type) and value in values.PLACES:
            return ["S", *values.PLACES[value]]
        name, module = getattr(value, "__name__", None), getattr(value, "__module__", None)
        if callable(value) and type(module) is str and module.partition(".")[0] in sys.stdlib_module_names:
            if getattr(sys.modules.get(module), str(name), None) is value:
                return ["S", module, name]
        is_iterator = hasattr(kind, "__next__")
        if not (callable(value) or is_iterator or isinstance(value, Exception)) or isinstance(value, type):
            raise values.Uncrossable(f"an object of type {kind.__name__}")
        if id(value) not in self.lent_numbers:
            self.lent_numbers[id(value)] = len(self.lent)
            self.lent.append(value)
        number = self.lent_numbers[id(value)]
        if isinstance(value, Exception):
            base = next(
                each for each in kind.__mro__ if id(each) in self.numbers or vars(builtins).get(each.__name__) is each
            )
            return ["er", number, self.hand_over(base), kind.__name__, self.codec.encode(self.args_of(value))]
        if is_iterator:
            return ["it", number]
        return ["cb", number, str(name or kind.__name__)[:200], _parameters(value)]

    def args_of(self, error: BaseException) -> tuple:
        return tuple(arg if type(arg) in _PLAIN else str(arg) for arg in error.args)

    # Objects of the program on their way in

    def special(self, data: list) -> Any:
        """The value that tagged JSON of the program stands for; raises BrokenChannel if it is malformed."""
        tag, number = data[0], data[1]
        if tag == "mine":
            return self.lent[number]
        if tag == "K" or tag == "S":
            return self.permitted(self.class_of(data))
        if tag == "E":
            return self.exception(data[1])
        if type(number) is not int or number < 0:
            raise wire.BrokenChannel("a malformed handle")
        kind: Any = self.class_of(data[2]) if len(data) > 2 and tag in ("h", "v") else None
        if number in self.handles:
            return self.permitted(self.handles[number])
        if tag == "g" or tag == "co":
            return self.keep(number, (handles.generator if tag == "g" else handles.coroutine)(number))
        if type(kind) is not handles.HandleType:
            raise wire.BrokenChannel("a malformed handle")
        base: Any = kind.facts.value_type
        make: Any = object if base is None else base
        if tag == "v":
            value = self.codec.decode(data[3])
            if base is None or type(value) is not base:
                raise wire.BrokenChannel("a value of another type than its class derives from")
            return self.keep(number, make.__new__(kind, value))
        if tag != "h":
            raise wire.BrokenChannel("a malformed handle")
        made = self.keep(number, make.__new__(kind))
        handles.hashes[id(made)] = data[3] if type(data[3]) is int else None
        return made

    def permitted(self, found: Any) -> Any:
        """An object on its way to the tests. They cannot use it if it is a class that catches their assertions."""
        if isinstance(found, type) and found in _CATCH_ALL:
            self.doubt(
                f"the tests cannot use {found.__name__} under a name of the program: it catches their assertions"
            )
        return found

    def keep(self, number: int, made: Any) -> Any:
        self.handles[number] = made
        self.numbers[id(made)] = number
        return made

    def class_of(self, data: list) -> Any:
        """The class that tagged JSON names or describes."""
        tag = data[0]
        if tag == "S":
            return values.TYPES.get((data[1], data[2])) or _standard(data[1], data[2]) or Exception
        if tag == "h":
            return self.handles[data[1]]
        if tag != "K":
            raise wire.BrokenChannel("a malformed class")
        number, facts = data[1], data[2]
        bases = [self.class_of(each) for each in facts["bases"]]
        if number in self.handles:
            return self.handles[number]
        made = _standard(facts["module"], facts["name"]) or handles.make_class(facts, bases)
        return self.keep(number, made)

    def exception(self, data: dict) -> BaseException:
        """An exception of the program, as the tests catch it. Never runs code of the program."""
        kind = self.class_of(data["k"])
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise wire.BrokenChannel("an exception without an exception class")
        args = self.codec.decode(data["a"][0]) if data["a"] is not None else None
        error = handles.make_exception(kind, args if type(args) is tuple else (str(data["m"]),))
        for name, written in data["v"]:
            value = self.codec.decode(written[0])
            if name == "__notes__":
                for note in value if type(value) is list else ():
                    error.add_note(str(note))
            elif type(name) is str and name[:2] != "__":
                try:
                    setattr(error, name, value)
                except AttributeError:
                    pass  # an attribute that its class does not let us set
        if data["m"] and str(error) != data["m"]:
            handles.texts[id(error)] = str(data["m"])
            if type(kind) is not handles.HandleType:
                error.args = (str(data["m"]),)
        for key, attribute in (("x", "__context__"), ("c", "__cause__")):
            other = self.codec.decode(data[key]) if key in data else None
            if isinstance(other, BaseException):
                setattr(error, attribute, other)
        error.__suppress_context__ = data["s"] is True
        self.said[id(error)] = error, str(data["d"])[:500]
        if len(self.said) > _MOST_SAID:  # they hold the frames that they passed
            oldest = next(iter(self.said))
            del self.said[oldest]
            handles.texts.pop(oldest, None)
        return error

    def said_of(self, error: BaseException) -> str | None:
        """How the program describes an exception that it raised; `None` if the tests raised it."""
        found = self.said.get(id(error))
        return found[1] if found is not None and found[0] is error else None

    # Requests

    def ask(self, what: str, /, *args: Any, **kwargs: Any) -> Any:
        """Has the solution process do something with its objects; returns what it returned or raises what it raised."""
        with self.lock:
            while self.unclosed and not self.talking:
                self.close(self.unclosed.pop())
            was_talking, self.talking = self.talking, True
            try:
                return self._ask(what, args, kwargs)
            finally:
                self.talking = was_talking

    def close(self, number: int) -> None:
        """Closes a generator of the program: now, or before the next request if one is under way."""
        if self.talking:
            self.unclosed.append(number)
        elif number in self.handles and not self.dead:
            self.ask("method", self.handles[number], "close")

    def _ask(self, what: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.dead:
            raise SolutionGone("the program's process has ended")
        self.asked += 1
        self.changes += what not in _LOOKS
        codec = self.codec
        self.dropped += codec.oldest()
        codec.drop(self.dropped)
        codec.begin()
        try:
            frame: dict[str, Any] = {
                "o": what,
                "z": self.dropped,
                "u": codec.changes(),
                "a": [codec.encode(arg) for arg in args],
            }
            if kwargs:
                frame["k"] = {key: codec.encode(value) for key, value in kwargs.items()}
            self.add_settings(frame)
            self.send(frame)
        except values.Uncrossable as error:
            codec.rollback()
            raise self.doubt(f"cannot pass {error} to the program") from None
        self.dropped = []
        if what != "contains":
            self.tell([*args, *kwargs.values()])
        codec.snapshot()
        return self.receive_answer(what)

    def add_settings(self, frame: dict) -> None:
        """Adds what the tests have set for their process to a request."""
        now = settings()
        if now != self.sent_settings or seeds:
            frame["set"] = [[name, value] for name, value in now.items() if self.sent_settings.get(name) != value]
            frame["set"] += seeds
            seeds.clear()
            self.sent_settings = now

    def receive_answer(self, what: str) -> Any:
        codec = self.codec
        problem: BaseException | None = None
        while True:
            reply = self.receive()
            try:
                codec.apply(reply["u"])
                codec.snapshot()
                problem = problem or output.hear(reply["p"])
                if "ask" in reply:
                    self.send(self.oblige(reply))
                    continue
                if "y" in reply:
                    raised: BaseException = self.doubt(str(reply["y"])[:500])
                elif "x" in reply:
                    raised = codec.decode(reply["x"])
                    if not isinstance(raised, BaseException):
                        raise wire.BrokenChannel("an exception that is none")
                    if not isinstance(raised, _ENDS.get(what, ())):
                        raised = self.endless(raised)
                else:
                    value = codec.decode(reply["r"])
                    codec.snapshot()
                    if problem is not None:
                        raise problem
                    return value
                codec.snapshot()
            except _MALFORMED as malformed:
                if malformed is problem:
                    raise
                raise self.gone(malformed) from None
            raise raised

    def receive(self) -> dict:
        try:
            frame = wire.receive(self.sock)
        except (EOFError, OSError, wire.BrokenChannel) as error:
            raise self.gone(error) from None
        if type(frame) is not dict:
            raise self.gone(wire.BrokenChannel("not a message"))
        return frame

    def send(self, frame: dict) -> None:
        try:
            wire.send(self.sock, frame)
        except wire.BrokenChannel as error:
            raise values.Uncrossable(str(error)) from None
        except OSError as error:
            raise self.gone(error) from None

    def oblige(self, reply: dict) -> dict:
        """Calls a function of the tests for the program; returns the answer as a frame."""
        thing = self.lent[reply["ask"]]
        args = [self.codec.decode(arg) for arg in reply["a"]]
        kwargs = {key: self.codec.decode(value) for key, value in reply["k"].items()}
        self.codec.snapshot()
        answer: dict[str, Any] = {}
        self.talking = False
        try:
            value = next(thing) if hasattr(type(thing), "__next__") else thing(*args, **kwargs)
        except SolutionGone:
            raise
        except StopIteration:
            answer["stop"] = True
        except Exception as error:
            if isinstance(error, AssertionError) and self.refuted is None:
                self.refuted = error  # even if the program catches it
            answer["x"] = error
        else:
            answer["r"] = value
        self.talking = True
        self.codec.begin()
        try:
            changes = self.codec.changes()
            return {"u": changes, **{key: self.codec.encode(value) for key, value in answer.items()}}
        except values.Uncrossable as error:
            self.codec.rollback()
            self.codec.begin()
            problem = self.doubt(f"cannot pass {error} to the program")
            return {"u": self.codec.changes(), "x": self.codec.encode(problem)}
        finally:
            self.codec.snapshot()

    def endless(self, error: BaseException) -> BaseException:
        """An exception of the program, or another one in its place if it would end a loop of the tests."""
        if isinstance(error, IndexError):
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code.co_name != "__getitem__":
                frame = frame.f_back
            if frame is None or frame.f_code.co_filename not in ("<tests>", "<setup>"):
                return error
        elif not isinstance(error, (StopIteration, StopAsyncIteration)):
            return error
        stopped = ProgramStopped(str(error))
        self.said[id(stopped)] = stopped, self.said_of(error) or ""
        return stopped

    # Comparisons

    def alike(self, a: Any, b: Any, seen: set[tuple[int, int]]) -> bool:
        """Whether two values of attributes are equal, objects of the program by their attributes."""
        if a is b or (id(a), id(b)) in seen:
            return True
        kind = type(a)
        if kind is not type(b):
            return not (self.is_handle(a) or self.is_handle(b)) and bool(a == b)
        if len(seen) >= _MOST_COMPARED:
            return False
        seen.add((id(a), id(b)))
        if isinstance(kind, handles.HandleType):
            if kind.facts.is_exception or "__call__" in kind.facts.has:
                return False
            if kind.facts.base is not None and not self.alike(self.ask("plain", a), self.ask("plain", b), seen):
                return False
            return self.alike(self.ask("state", a), self.ask("state", b), seen)
        if issubclass(kind, dict):
            return len(a) == len(b) and all(key in b and self.alike(value, b[key], seen) for key, value in a.items())
        if kind in (list, tuple) or kind.__name__ == "deque":
            return len(a) == len(b) and all(self.alike(x, y, seen) for x, y in zip(a, b, strict=True))
        return bool(a == b)


def _standard(module: Any, name: Any) -> type[BaseException] | None:
    """The exception class of that name, if it belongs to the standard library and its module is loaded here."""
    top = module.partition(".")[0] if type(module) is str else ""
    if top not in sys.stdlib_module_names or top in _CONTROLLING or module not in sys.modules or type(name) is not str:
        return None
    found = vars(sys.modules[module]).get(name)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _parameters(function: Any) -> list | None:
    """Names and kinds of a function's parameters, and whether they have defaults: programs that curry count them."""
    if type(function) is not types.FunctionType:
        return None
    found = inspect.signature(function).parameters.values()
    return [[each.name, int(each.kind), each.default is not each.empty] for each in found]


# What tests set for their process, and the program's process gets with the next request

seeds: list[list] = []  # calls of `random.seed` since the last request
_recursion: list[int] = []  # recursion limits that were asked for


def settings() -> dict[str, Any]:
    """Settings of this process that programs are run with."""
    found: dict[str, Any] = {"recursion": _recursion[-1] if _recursion else sys.getrecursionlimit()}
    decimal = sys.modules.get("decimal")
    if decimal is not None:
        context = decimal.getcontext()
        found["decimal"] = [context.prec, context.rounding]
    return found


def note_seeds(name: str) -> None:
    """Has calls of a module's `seed` recorded."""
    module: Any = importlib.import_module(name)
    seed = module.seed

    def noting(*args: Any, **kwargs: Any) -> None:
        seed(*args, **kwargs)
        value = next(iter([*args, *kwargs.values()]), None)
        seeds.append([name, value if type(value) in (int, float, str) else None])

    module.seed = noting


def bound_recursion() -> None:
    """Keeps a high recursion limit of the tests from ending this process: it holds for the program, and here as far as the stack
    reaches."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = _STACK if hard == resource.RLIM_INFINITY else min(_STACK, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
    set_limit = sys.setrecursionlimit

    def setrecursionlimit(limit: int, /) -> None:
        set_limit(min(limit, stack // _LEVEL))
        _recursion.append(limit)

    sys.setrecursionlimit = setrecursionlimit
