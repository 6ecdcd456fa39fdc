"""The judge's channel to the program's process: what the tests ask of the program's objects, and the answers."""

import _thread
import builtins
import socket
import types
from typing import Any

from . import echo, lending, remote, wire
from .registry import Registry


_MOST_KEPT = 256  # nodes after which both sides forget them all
_MOST_TOLD = 64  # items of an argument that are remembered as shown to the program


class SolutionGone(BaseException):
    """The program's process has ended or broke the channel."""


class Session:
    """
    The channel to the solution process.

    Args:
        names (`list[str]`): Names that the tests take from the program.
        space (`dict`): The tests' namespace.
        repeat (`Echo`): Repeats what the program prints, and knows what the tests have patched.
    """

    def __init__(self, names: list[str], space: dict[str, Any], repeat: echo.Echo):
        self.names = names
        self.space = space
        self.echo = repeat
        self.dead = True
        self.refuted: BaseException | None = None  # why the present test cannot pass, even if it succeeds
        self.tested: frozenset[type] = frozenset()  # classes of the program that the tests use by their names
        self.asked = 0  # how often the program was asked for something
        self.changes = 0  # how often it may have changed something
        self.lent: list[Any] = []  # objects of the tests that the program was passed
        self.lent_numbers: dict[int, int] = {}  # id of such an object -> its number
        self.registry = Registry(len(names), self.lent)
        self.told: set[Any] = set()  # plain values that the program was shown
        self.classes: list[str] = []  # names of classes of the program that the tests may define too
        self.lock = _thread.RLock()
        self.talking = False
        self.unclosed: list[Any] = []  # generators to close with the next message
        remote.session = self

    def attach(self, sock: socket.socket) -> dict[str, Any]:
        """Talks to a fresh process from now on; returns what it exports, by name."""
        self.sock = sock
        self.codec = wire.Codec(0, self.hand_over, self.registry.stand_in, twin=self.twin)
        self.registry.begin(self.codec)
        self.dead = False
        self.talking = False
        self.echo.begin()
        self.shared: list[str] = []  # names of classes that the program knows the tests define too
        frame = self.receive()
        try:
            exports = {
                name: self.codec.decode(frame["exports"][name]) for name in self.names if name in frame["exports"]
            }
            self.classes = [name for name in frame["classes"] if type(name) is str and name not in exports]
        except (wire.BrokenChannel, TypeError, KeyError) as error:
            raise self.lost(error) from None
        self.codec.snapshot()
        self.tested = frozenset(value for value in exports.values() if isinstance(value, type))
        return exports

    def lost(self, error: BaseException) -> SolutionGone:
        self.dead = True
        return SolutionGone(str(error))

    def doubt(self, text: str) -> TypeError:
        """Records that the present test cannot be judged, so that it does not pass; returns an error that says why."""
        error = TypeError(text)
        if self.refuted is None:
            self.refuted = error
        return error

    def was_told(self, value: Any) -> bool:
        """Whether the program was shown this plain value."""
        return type(value) in _HASHABLE and value in self.told

    def tell(self, values: Any) -> None:
        for value in values:
            if type(value) in _HASHABLE:
                self.told.add(value)
            elif type(value) in (list, tuple, set, dict) and len(value) <= _MOST_TOLD:
                self.told.update(item for item in value if type(item) in _HASHABLE)

    # Objects on their way to the program

    def hand_over(self, value: Any) -> list:
        """A value of no plain type as tagged JSON; raises Uncrossable."""
        place = self.registry.place_of(value)
        if place is not None:
            if place.generation not in (self.registry.generation, None):
                raise wire.Uncrossable("an object of the program's earlier process, which has ended")
            return ["H", place.number]
        if isinstance(value, (type, types.BuiltinFunctionType)):
            name = value.__name__
            if vars(builtins).get(name) is value:
                return ["B", name]
        number = self.lent_numbers.get(id(value))
        if number is None:
            number = self.lent_numbers[id(value)] = len(self.lent)
            self.lent.append(value)
        return lending.write(value, number, self.codec.encode)

    def twin(self, kind: Any) -> Any:
        """From a name to the tests' class, or from a class to its name, if the program defines it too; otherwise `None`."""
        if isinstance(kind, str):
            return self.space.get(kind) if kind in self.both() else None
        return kind.__name__ if kind.__module__ == "tests" and kind.__name__ in self.both(kind) else None

    def both(self, kind: Any = None) -> list[str]:
        """Names of the classes that both the program and the tests define; with `kind`, only that class's."""
        found = [(name, self.space.get(name)) for name in self.classes]
        return [
            name
            for name, other in found
            if type(other) is type
            and other.__module__ == "tests"
            and other.__dictoffset__ != 0
            and not issubclass(other, (BaseException, *_VALUE_TYPES))
            and (kind is None or kind is other)
        ]

    # Requests

    def ask(self, what: str, /, *args: Any, **kwargs: Any) -> Any:
        """Has the solution process do something with its objects; returns what it returned or raises what it raised."""
        with self.lock:
            while self.unclosed and not self.talking:
                self._ask("close", (self.unclosed.pop(),), {})
            return self._ask(what, args, kwargs)

    def close(self, thing: Any) -> None:
        """Closes a generator of the program: now, or with the next message if one is being sent."""
        place = self.registry.place_of(thing)
        if place is None or place.generation != self.registry.generation or self.dead:
            return  # of a process that has ended, or of an earlier program
        with self.lock:
            if self.talking:
                self.unclosed.append(thing)
            else:
                self._ask("close", (thing,), {})

    def _ask(self, what: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.dead:
            raise SolutionGone("the program's process has ended")
        self.asked += 1
        self.changes += what not in _LOOKS
        self._send_request(what, args, kwargs)
        if what != "contains":  # which itself sends the value that the test looks for
            self.tell(args)
        if kwargs:
            self.tell(kwargs.values())
        self.codec.snapshot()
        return self._receive_answer()

    def _send_request(self, what: str, args: tuple, kwargs: dict[str, Any]) -> None:
        codec = self.codec
        forget = len(codec.nodes) > _MOST_KEPT
        if forget:
            codec.drop()
        self.talking = True
        patches = self.echo.patches()
        codec.begin()
        try:
            frame = {
                "o": what,
                "z": forget,
                "u": codec.changes(),  # first, because it is read first
                "a": [codec.encode(arg) for arg in args],
                "k": {key: codec.encode(value) for key, value in kwargs.items()},
            }
            if patches is not None:
                frame["p"] = [[module, name, codec.encode(value)] for module, name, value in patches]
            if self.classes and (both := self.both()) != self.shared:
                frame["both"] = self.shared = both
            self.send(frame)
        except wire.Uncrossable as error:
            codec.rollback()
            self.echo.not_sent()
            self.talking = False
            raise self.doubt(f"cannot pass {error} to the program") from None

    def _receive_answer(self) -> Any:
        codec = self.codec
        problems: list[BaseException] = []  # raised by the tests when they hear what the program prints or warns of
        while True:
            reply = self.receive()
            try:
                codec.apply(reply["u"])
                codec.snapshot()
                if "e" in reply:
                    problems += _heard(self.echo.hear(reply["e"], codec.decode))
                if "ask" in reply:
                    self.send(self.oblige(reply))
                    continue
                if "y" in reply:
                    problem: BaseException = self.doubt(str(reply["y"])[:500])
                elif "x" in reply:
                    problem = self.problem(reply["x"])
                else:
                    value = codec.decode(reply["r"])
                    codec.snapshot()
                    self.talking = False
                    if problems:
                        raise problems[0]
                    return value
                codec.snapshot()
            except _MALFORMED as malformed:
                raise self.lost(malformed) from None
            self.talking = False
            raise problem

    def problem(self, data: list) -> BaseException:
        """The exception that the program raised, or one of the tests' that passed through it."""
        error = self.codec.decode(data)
        if not isinstance(error, BaseException):
            raise wire.BrokenChannel("an exception without an exception class")
        place = self.registry.place_of(error)
        if place is not None:
            place.said = str(data[3]["d"])[:500]
            self.registry.forget_errors()
        return error

    def receive(self) -> dict:
        try:
            frame = wire.receive(self.sock)
        except (EOFError, OSError, wire.BrokenChannel) as error:
            raise self.lost(error) from None
        if type(frame) is not dict:
            raise self.lost(wire.BrokenChannel("not a message"))
        return frame

    def send(self, frame: dict) -> None:
        try:
            wire.send(self.sock, frame)
        except wire.BrokenChannel as error:
            raise wire.Uncrossable(str(error)) from None
        except OSError as error:
            raise self.lost(error) from None

    def oblige(self, reply: dict) -> dict:
        """Does what the program asks of an object of the tests; returns the answer as a frame."""
        thing, what = self.lent[reply["h"]], reply["ask"]
        args = [self.codec.decode(arg) for arg in reply["a"]]
        kwargs = {key: self.codec.decode(value) for key, value in reply["k"].items()}
        self.codec.snapshot()
        try:
            self.talking = False
            try:
                value, key = lending.use(thing, what, args, kwargs), "r"
            finally:
                self.talking = True
        except SolutionGone:
            raise
        except Exception as error:
            if isinstance(error, AssertionError) and self.refuted is None:
                self.refuted = error  # even if the program catches it
            value, key = error, "x"
        self.codec.begin()
        try:
            return {"u": self.codec.changes(), key: self.codec.encode(value)}
        except wire.Uncrossable as error:
            self.codec.rollback()
            self.codec.begin()
            problem = self.doubt(f"cannot pass {error} to the program")
            return {"u": self.codec.changes(), "x": self.codec.encode(problem)}
        finally:
            self.codec.snapshot()


def _heard(events: list) -> list[BaseException]:
    """Exceptions that are raised when the tests hear of events, for example where they turn warnings into errors."""
    found: list[BaseException] = []
    for event in events:
        try:
            event()
        except Exception as error:
            found.append(error)
    return found


# operations that change nothing in the program
_LOOKS = frozenset(
    "iter next pending len bool getitem contains getattr has str repr hash equal isinstance base".split()
)
_MALFORMED = (wire.BrokenChannel, KeyError, TypeError, IndexError, ValueError, AttributeError, RecursionError)
_HASHABLE = frozenset((int, float, str, bytes, bool, type(None)))
_VALUE_TYPES = (int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
