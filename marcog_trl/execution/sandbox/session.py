"""The judge's channel to the program's process: which stand-in is for which object, and what is asked and answered."""

import _thread
import builtins
import socket
import sys
import types
from typing import Any

from . import echo, errors, flows, lending, remote, stand_ins, wire
from .plain_values import IMMUTABLE


_MOST_KEPT = 256  # nodes after which both sides forget them all
_MOST_TOLD = 64  # items of an argument that are remembered as shown to the program


class SolutionGone(BaseException):
    """The program's process has ended or broke the channel."""


class Place:
    """What object of the program something stands for."""

    __slots__ = ("generation", "message", "number", "reader", "said", "seen", "thing")

    def __init__(self, thing: Any, number: int, generation: int | None):
        self.thing = thing
        self.number = number
        self.generation = generation  # of the process that has it; None where every process of the program has it
        self.reader: flows.Reader | None = None
        self.seen: tuple[int, list] | None = None  # when it was last iterated over, and its items
        self.message = ""  # of an exception
        self.said: str | None = None  # of an exception that the program raised: how it describes it


class Session:
    """
    The channel to the solution process and the stand-ins for its objects.

    Args:
        names (`list[str]`): What the tests take from the program.
        space (`dict`): The tests' namespace.
        repeat (`Echo`): Repeats what the program prints, and knows what the tests have patched.
    """

    def __init__(self, names: list[str], space: dict[str, Any], repeat: echo.Echo):
        self.names = names
        self.space = space
        self.echo = repeat
        self.dead = True
        self.refuted: BaseException | None = None  # why the present test cannot pass, whatever it makes of it
        self.generation = 0
        self.tested: frozenset[type] = frozenset()  # classes of the program that the tests use by their names
        self.asked = 0  # times that the program was asked for something
        self.changes = 0  # times that it may have changed something
        self.ours: list[Any] = []  # that the program was passed
        self.our_numbers: dict[int, int] = {}
        self.stand_ins: dict[int, Any] = {}
        self.places: dict[int, Place] = {}  # by the id of what stands there, which is kept
        self.kinds: dict[type, remote.Kind] = dict(stand_ins.COMMON.values())
        self.instance_types: dict[int, type] = {}  # number of a class -> class of the stand-ins of its instances
        self.metas: dict[Any, type] = {}
        self.raised: list[Any] = []  # exceptions with a place
        self.told: set[Any] = set()  # plain values that the program was shown
        self.classes: list[str] = []  # names of classes of the program that the tests may define too
        self.lock = _thread.RLock()
        self.talking = False
        self.unclosed: list[Any] = []
        remote.session = self

    def attach(self, sock: socket.socket) -> dict[str, Any]:
        """Talks to a fresh process from now on; returns what it exports, by name."""
        self.sock = sock
        self.generation += 1
        self.codec = wire.Codec(0, self.hand_over, self.stand_in, twin=self.twin)
        # the exports have the same numbers in every process of the program, and the tests hold their stand-ins
        count = len(self.names)
        self.stand_ins = {number: made for number, made in self.stand_ins.items() if number < count}
        self.instance_types = {number: kind for number, kind in self.instance_types.items() if number < count}
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

    def receive(self) -> dict:
        try:
            frame = wire.receive(self.sock)
        except (EOFError, OSError, wire.BrokenChannel) as error:
            raise self.lost(error) from None
        if type(frame) is not dict:
            raise self.lost(wire.BrokenChannel("not a message"))
        return frame

    def doubt(self, text: str) -> TypeError:
        """Records that the present test cannot be judged, so that it does not pass; returns an error that says why."""
        error = TypeError(text)
        if self.refuted is None:
            self.refuted = error
        return error

    def place_of(self, thing: Any) -> Place | None:
        place = self.places.get(id(thing))
        return place if place is not None and place.thing is thing else None

    def was_told(self, value: Any) -> bool:
        return type(value) in _HASHABLE and value in self.told

    def tell(self, values: Any) -> None:
        for value in values:
            if type(value) in _HASHABLE:
                self.told.add(value)
            elif type(value) in (list, tuple, set, dict) and len(value) <= _MOST_TOLD:
                self.told.update(item for item in value if type(item) in _HASHABLE)

    # Values of ours on their way out

    def hand_over(self, value: Any) -> list:
        place = self.place_of(value)
        if place is not None:
            if place.generation not in (self.generation, None):
                raise wire.Uncrossable("an object of the program's earlier process, which has ended")
            return ["H", place.number]
        if isinstance(value, (type, types.BuiltinFunctionType)):
            name = value.__name__
            if vars(builtins).get(name) is value:
                return ["B", name]
        number = self.our_numbers.get(id(value))
        if number is None:
            number = self.our_numbers[id(value)] = len(self.ours)
            self.ours.append(value)
        return lending.write(value, number, self.codec.encode)

    def twin(self, kind: Any) -> Any:
        """The tests' class of a name, or the name of a class, if the program defines it too; otherwise `None`."""
        if isinstance(kind, str):
            return self.space.get(kind) if kind in self.both() else None
        return kind.__name__ if kind.__module__ == "tests" and kind.__name__ in self.both(kind) else None

    def both(self, kind: Any = None) -> list[str]:
        """Names of the classes that both sides define."""
        found = [(name, self.space.get(name)) for name in self.classes]
        return [
            name
            for name, other in found
            if type(other) is type
            and other.__module__ == "tests"
            and other.__dictoffset__ != 0
            and not issubclass(other, (BaseException, *_VALUES))
            and (kind is None or kind is other)
        ]

    # Values of theirs on their way in

    def stand_in(self, data: list) -> Any:
        tag, number = data[0], data[1]
        if type(number) is not int or number < 0:
            return self.named(tag, number)
        if tag == "mine":
            return self.ours[number]
        if tag == "K":
            return self.kind(number, data[2])
        if tag == "E":
            return self.stand_ins[number] if number in self.stand_ins else self.error(number, data[2], data[3])
        kind = self.kind_of_number(data[2]) if len(data) > 2 else None
        if number in self.stand_ins:
            return self.stand_ins[number]
        if tag == "g" or tag == "co":
            thing = _Handle()
            self.settle(number, thing)
            made: Any = flows.generator(thing) if tag == "g" else flows.coroutine(thing)
            self.places[id(made)] = Place(made, number, self.places[id(thing)].generation)
            self.stand_ins[number] = made
            return made
        if kind is None or tag not in ("h", "v"):
            raise wire.BrokenChannel("a malformed handle")
        base: Any = self.kinds[kind].base
        if tag == "h":
            made = object.__new__(kind)
        elif base in IMMUTABLE:
            value = self.codec.decode(data[3])
            if type(value) is not base:
                raise wire.BrokenChannel("a value of another type than its class derives from")
            made = base.__new__(kind, value)
        else:
            raise wire.BrokenChannel("a malformed handle")
        self.settle(number, made)
        return made

    def named(self, tag: str, name: Any) -> Any:
        if tag == "P" and name in stand_ins.COMMON:
            return stand_ins.COMMON[name][1].public
        found = vars(builtins).get(name) if tag == "B" and type(name) is str else None
        if not (isinstance(found, type) and issubclass(found, BaseException)):
            raise wire.BrokenChannel("a malformed handle")
        return found

    def settle(self, number: int, made: Any) -> Place:
        self.stand_ins[number] = made
        place = Place(made, number, None if number < len(self.names) else self.generation)
        self.places[id(made)] = place
        return place

    def kind(self, number: int, facts: dict) -> Any:
        if number in self.stand_ins:
            return self.stand_ins[number]
        found = errors.standard(facts["module"], facts["name"])
        bases = [self.codec.decode(base) for base in facts["bases"]]
        if found is not None:
            public = found
        else:
            for base in bases:
                if not isinstance(base, type):
                    raise wire.BrokenChannel("a class that derives from no class")
            public, self.instance_types[number] = stand_ins.make_kind(facts, bases)
            if facts["module"] in _ABSTRACT and facts["name"] in vars(sys.modules[facts["module"]]):
                vars(sys.modules[facts["module"]])[facts["name"]].register(public)
        self.settle(number, public)
        return public

    def kind_of_number(self, data: list) -> type:
        """The class of the stand-ins of the instances of a class."""
        if data[0] == "P":
            return stand_ins.COMMON[data[1]][0]
        if data[0] == "T":
            raise wire.BrokenChannel("a value that should be plain")
        self.stand_in(data)
        return self.instance_types[data[1]]

    def error(self, number: int, kind_data: list, data: dict) -> BaseException:
        kind = self.codec.decode(kind_data)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise wire.BrokenChannel("an exception of no kind")
        args = None if data["a"] is None else self.codec.decode(data["a"][0])
        message = str(data["m"])
        made = errors.make(kind, args if type(args) is tuple else (message,))
        if made is None:
            made = Exception(message)
        place = self.settle(number, made)
        place.message = message
        self.raised.append(made)
        errors.complete(made, data, self.codec.decode)
        return made

    def forget_errors(self) -> None:
        """Lets go of exceptions, which hold the frames that they went through."""
        for error in self.raised[: -errors.MOST_KEPT]:
            place = self.places.pop(id(error), None)
            if place is not None:
                self.stand_ins.pop(place.number, None)
        del self.raised[: -errors.MOST_KEPT]

    # Operations

    def ask(self, what: str, /, *args: Any, **kwargs: Any) -> Any:
        """Has the solution process do something with its objects; returns what it returned or raises what it raised."""
        with self.lock:
            while self.unclosed and not self.talking:
                self._ask("close", (self.unclosed.pop(),), {})
            return self._ask(what, args, kwargs)

    def close(self, thing: Any) -> None:
        """Closes a generator of the program: now, or with the next message if one is on its way."""
        place = self.place_of(thing)
        if place is None or place.generation != self.generation or self.dead:
            return  # of a process that has ended, and of an earlier program
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
                "u": codec.changes(),  # first, as it is read
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
        if what != "contains":  # it was told what the test looks for in order to be asked
            self.tell(args)
        if kwargs:
            self.tell(kwargs.values())
        codec.snapshot()
        problems: list[BaseException] = []  # that the tests make of what the program prints or warns of
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
        """The exception that the program raised, or one of the tests' that went through it."""
        error = self.codec.decode(data)
        if not isinstance(error, BaseException):
            raise wire.BrokenChannel("an exception of no kind")
        place = self.place_of(error)
        if place is not None:
            place.said = str(data[3]["d"])[:500]
            self.forget_errors()
        return error

    def send(self, frame: dict) -> None:
        try:
            wire.send(self.sock, frame)
        except wire.BrokenChannel as error:
            raise wire.Uncrossable(str(error)) from None
        except OSError as error:
            raise self.lost(error) from None

    def oblige(self, reply: dict) -> dict:
        """Does for the program what it asks of one of the tests' own objects."""
        thing, what = self.ours[reply["h"]], reply["ask"]
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
                self.refuted = error  # whatever the program makes of it
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
    """Exceptions that come of telling the tests, such as a warning that they make an error."""
    found: list[BaseException] = []
    for event in events:
        try:
            event()
        except Exception as error:
            found.append(error)
    return found


_LOOKS = frozenset(
    "iter next pending len bool getitem contains getattr has str repr hash equal isinstance base".split()
)
_ABSTRACT = ("collections.abc", "numbers")  # modules whose classes take in what has their methods
_MALFORMED = (wire.BrokenChannel, KeyError, TypeError, IndexError, ValueError, AttributeError, RecursionError)
_HASHABLE = frozenset((int, float, str, bytes, bool, type(None)))
_VALUES = (int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)


class _Handle:
    """Stands for a generator or a coroutine of the program, for what the tests see of it."""

    __slots__ = ()
