"""Keeps which stand-in is for which object of the program, and makes stand-ins from what the program's process sends."""

import builtins
import sys
from typing import Any

from . import errors, flows, remote, stand_ins, wire
from .plain_values import IMMUTABLE


_ABSTRACT_MODULES = ("collections.abc", "numbers")  # modules with classes whose members are told by their methods


class Place:
    """
    The object of the program that a stand-in is for.

    Args:
        thing (`Any`): The stand-in.
        number (`int`): The object's number.
        generation (`int` or `None`): The process that has the object; `None` if every process of the program has it.
    """

    __slots__ = ("generation", "message", "number", "reader", "said", "seen", "thing")

    def __init__(self, thing: Any, number: int, generation: int | None):
        self.thing = thing
        self.number = number
        self.generation = generation
        self.reader: flows.ItemReader | None = None
        self.seen: tuple[int, list] | None = None  # when it was last iterated over, and its items
        self.message = ""  # text of an exception
        self.said: str | None = None  # how the program describes an exception that it raised


class Registry:
    """
    The stand-ins of one program.

    Args:
        exports (`int`): Number of names that the tests take from the program. Their objects have the first numbers.
        lent (`list`): Objects of the tests that the program was passed, by their numbers.
    """

    def __init__(self, exports: int, lent: list[Any]):
        self.exports = exports
        self.lent = lent
        self.generation = 0  # number of the program's present process
        self.stand_ins: dict[int, Any] = {}
        self.places: dict[int, Place] = {}  # by the id of the stand-in, which the place keeps alive
        self.kinds: dict[type, remote.Kind] = dict(stand_ins.COMMON.values())
        self.instance_types: dict[int, type] = {}  # number of a class -> class of its instances' stand-ins
        self.metas: dict[Any, type] = {}
        self.raised: list[Any] = []  # exceptions with a place
        remote.registry = self

    def begin(self, codec: wire.Codec) -> None:
        """Begins with a fresh process of the program. Its exports have the same numbers, and the tests hold their
        stand-ins."""
        self.codec = codec
        self.generation += 1
        self.stand_ins = {number: made for number, made in self.stand_ins.items() if number < self.exports}
        self.instance_types = {number: kind for number, kind in self.instance_types.items() if number < self.exports}

    def place_of(self, thing: Any) -> Place | None:
        """The place of a stand-in; `None` for anything else."""
        place = self.places.get(id(thing))
        return place if place is not None and place.thing is thing else None

    def stand_in(self, data: list) -> Any:
        """The stand-in that tagged JSON describes; raises BrokenChannel if it is malformed."""
        tag, number = data[0], data[1]
        if type(number) is not int or number < 0:
            return self._named(tag, number)
        if tag == "mine":
            return self.lent[number]
        if tag == "K":
            return self._class(number, data[2])
        if tag == "E":
            return self.stand_ins[number] if number in self.stand_ins else self._error(number, data[2], data[3])
        kind = self._instance_type(data[2]) if len(data) > 2 else None
        if number in self.stand_ins:
            return self.stand_ins[number]
        if tag == "g" or tag == "co":
            thing = _Flow()
            self._settle(number, thing)
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
        self._settle(number, made)
        return made

    def _named(self, tag: str, name: Any) -> Any:
        """A class that both processes have, by its name."""
        if tag == "P" and name in stand_ins.COMMON:
            return stand_ins.COMMON[name][1].public
        found = vars(builtins).get(name) if tag == "B" and type(name) is str else None
        if not (isinstance(found, type) and issubclass(found, BaseException)):
            raise wire.BrokenChannel("a malformed handle")
        return found

    def _settle(self, number: int, made: Any) -> Place:
        self.stand_ins[number] = made
        place = Place(made, number, None if number < self.exports else self.generation)
        self.places[id(made)] = place
        return place

    def _class(self, number: int, facts: dict) -> Any:
        if number in self.stand_ins:
            return self.stand_ins[number]
        found = errors.standard(facts["module"], facts["name"])
        bases = [self.codec.decode(base) for base in facts["bases"]]
        if found is not None:
            public = found
        else:
            for base in bases:
                if not isinstance(base, type):
                    raise wire.BrokenChannel("a class with a base that is no class")
            public, self.instance_types[number] = stand_ins.make_kind(facts, bases)
            if facts["module"] in _ABSTRACT_MODULES and facts["name"] in vars(sys.modules[facts["module"]]):
                vars(sys.modules[facts["module"]])[facts["name"]].register(public)
        self._settle(number, public)
        return public

    def _instance_type(self, data: list) -> type:
        """The class of the stand-ins of a class's instances."""
        if data[0] == "P":
            return stand_ins.COMMON[data[1]][0]
        if data[0] == "T":
            raise wire.BrokenChannel("a value that should be plain")
        self.stand_in(data)
        return self.instance_types[data[1]]

    def _error(self, number: int, kind_data: list, data: dict) -> BaseException:
        kind = self.codec.decode(kind_data)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise wire.BrokenChannel("an exception without an exception class")
        args = None if data["a"] is None else self.codec.decode(data["a"][0])
        message = str(data["m"])
        made = errors.make(kind, args if type(args) is tuple else (message,))
        if made is None:
            made = Exception(message)
        place = self._settle(number, made)
        place.message = message
        self.raised.append(made)
        errors.complete(made, data, self.codec.decode)
        return made

    def forget_errors(self) -> None:
        """Drops all but the latest exceptions, which hold the frames that they passed."""
        for error in self.raised[: -errors.MOST_KEPT]:
            place = self.places.pop(id(error), None)
            if place is not None:
                self.stand_ins.pop(place.number, None)
        del self.raised[: -errors.MOST_KEPT]


class _Flow:
    """Stands for a generator or a coroutine of the program, behind the one that the tests see."""

    __slots__ = ()
