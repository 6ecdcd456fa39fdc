"""The classes of stand-ins for the program's objects on the judge's side: one for each class of the program.

A stand-in's class has the special methods that the program's class has, and no others. So Python says the same of a stand-in
as of the object: whether it is iterable, can be hashed, or has the type of another. The registry keeps which object a stand-in
is for; the stand-in itself does not.
"""

import types
from typing import Any

from . import methods, remote, special
from .methods import SPECIAL_METHODS, TEXT_METHODS
from .plain_values import COMMON_TYPES, IMMUTABLE, PLAIN_VALUE


# Attributes

_KEPT = frozenset(("__class__", "__doc__", "__module__", "__eq__", "__ne__", "__hash__", "__reduce_ex__", "__dir__"))


def _is_special(name: str) -> bool:
    return name[:2] == "__" and name[-2:] == "__"


def _remote_attribute(thing: Any, name: str) -> Any:
    if name in special.HOOKS:
        if remote.ask(thing, "has", name) is not False:
            remote.session.doubt(f"{name} of the program's objects is not available to the tests")
        raise AttributeError(f"{type(thing).__name__!r} object has no attribute {name!r}")
    return remote.ask(thing, "getattr", name)


def _get(self: Any, name: str) -> Any:
    kind = remote.kind_of(self)
    if name == "__class__":
        return kind.public
    if name in special.SPECIAL or name in _KEPT or name in kind.local:
        return object.__getattribute__(self, name)
    if name in kind.fields:
        return tuple.__getitem__(self, kind.fields[name])
    if remote.registry.place_of(self) is None:  # made in this process, from a class of the program
        return object.__getattribute__(self, name)
    return _remote_attribute(self, name)


def _set(self: Any, name: str, value: Any) -> None:
    if name in remote.kind_of(self).local:
        object.__setattr__(self, name, value)
    else:
        remote.ask(self, "setattr", name, value)


def _delete(self: Any, name: str) -> None:
    remote.ask(self, "delattr", name)


class _Copied:
    """What `copy` copies in place of a stand-in. Only `copy.deepcopy` calls its `__deepcopy__`."""

    def __init__(self, thing: Any, deep: bool):
        self.thing = thing
        self.deep = deep

    def __deepcopy__(self, memo: Any) -> "_Copied":
        return _Copied(self.thing, True)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise remote.session.doubt("objects of the program cannot be pickled")


def _copy(copied: _Copied) -> Any:
    return remote.ask(copied.thing, "deepcopy" if copied.deep else "copy")


def _reduce(self: Any, protocol: Any) -> Any:
    return _copy, (_Copied(self, False),)


def _directory(self: Any) -> list[str]:
    return remote.exact(remote.ask(self, "dir"), list)


def _text_of_error(self: Any) -> str:
    place = remote.registry.place_of(self)
    return BaseException.__str__(self) if place is None else place.message


# Classes

_LOCAL_OF_TYPES = frozenset(
    "__class__ __name__ __qualname__ __module__ __mro__ __bases__ __base__ __dict__ __flags__ __basicsize__ __itemsize__ "
    "__dictoffset__ __weakrefoffset__ __subclasses__ __instancecheck__ __subclasscheck__ __subclasshook__ __eq__ __ne__ "
    "__hash__ __text_signature__ __prepare__ __reduce_ex__ __abstractmethods__".split()
)


class ForeignType(type):
    """The class of stand-ins for classes."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise remote.session.doubt(
            "the tests derive a class from a class of the program, which would run the program's code"
        )

    def __call__(cls, /, *args: Any, **kwargs: Any) -> Any:
        return remote.ask(cls, "call", *args, **kwargs)

    def __getattribute__(cls, name: str) -> Any:
        if name in _LOCAL_OF_TYPES or name in special.SPECIAL:
            return type.__getattribute__(cls, name)
        if name == "mro":
            return type.__getattribute__(cls, name)
        return _remote_attribute(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "__abstractmethods__":
            type.__setattr__(cls, name, value)
        else:
            remote.ask(cls, "setattr", name, value)

    def __delattr__(cls, name: str) -> None:
        remote.ask(cls, "delattr", name)

    def __dir__(cls) -> list[str]:
        return remote.exact(remote.ask(cls, "dir"), list)

    def __instancecheck__(cls, thing: Any) -> bool:
        if type.__instancecheck__(cls, thing):
            return True
        if remote.is_foreign(thing):
            return remote.ask(thing, "isinstance", cls) is True
        return _no_member(cls)

    def __subclasscheck__(cls, kind: Any) -> bool:
        if type.__subclasscheck__(cls, kind):
            return True
        if remote.is_foreign(kind):
            return remote.ask(kind, "issubclass", cls) is True
        return _no_member(cls)


def _no_member(cls: Any) -> bool:
    kind = remote.registry.kinds.get(cls)
    if kind is not None and kind.checks:
        raise remote.session.doubt(
            f"{cls.__name__} of the program is not asked what its instances are, because its answer would not count"
        )
    return False


_META = frozenset(
    "__len__ __iter__ __getitem__ __contains__ __bool__ __reversed__ __repr__ __str__ __or__ __ror__".split()
)
_BASES: dict[str, type] = {kind.__name__: kind for kind in PLAIN_VALUE}
_Doc = property(lambda self: remote.ask(self, "getattr", "__doc__"))
_NO_NAMES: frozenset[str] = frozenset()


def make_kind(facts: dict, bases: list[Any]) -> tuple[type, type]:
    """
    Makes the stand-in for a class of the program.

    Args:
        facts (`dict`): The program's description of the class, written by `Server.hand_out_kind`.
        bases (`list`): The stand-ins for the classes that it derives from.

    Returns:
        `tuple[type, type]`: The class that tests see, and the class of its instances' stand-ins. Mostly they are the same.
    """
    name, has, own = facts["name"], frozenset(facts["has"]), frozenset(facts["own"])
    value = _BASES.get(facts["base"])
    meta = _meta_of(frozenset(facts["meta"]) & _META, bases)
    error = next((base for base in bases if isinstance(base, type) and issubclass(base, BaseException)), None)
    if value is None or value in IMMUTABLE or error is not None:
        space = _space(facts, own if value is not None else has, error)
        space["__slots__"] = ("__weakref__",) if facts["weak"] and value is None and not _weak(bases) else ()
        if value is not None:
            for each in ("__int__", "__float__", "__complex__", "__index__", "__hash__"):
                space.pop(each, None)
            if "__eq__" in space:
                space["__hash__"] = None if facts["unhashable"] else value.__hash__
        made = _of(name, tuple(bases), space, meta)
        return made, _register(made, facts, made)
    public = _of(name, tuple(bases), {"__module__": facts["module"], "__slots__": ()}, meta)
    remote.registry.kinds[public] = _describe(facts, public)
    space = {**_space(facts, has), "__slots__": ("__weakref__",)}
    return public, _register(_of(name, (), space), facts, public)


def _of(name: str, bases: tuple, space: dict, meta: type = ForeignType) -> Any:
    try:
        made: Any = type.__new__(meta, name, bases, space)
    except TypeError:  # bases that cannot be combined here, and that are not needed
        errors = tuple(base for base in bases if issubclass(base, BaseException))
        made = type.__new__(meta, name, errors[:1], {**space, "__slots__": ()})
    if "__slots__" in space:
        type.__delattr__(made, "__slots__")
    return made


def _register(made: Any, facts: dict, public: type) -> type:
    remote.registry.kinds[made] = _describe(facts, public)
    return made


def _describe(facts: dict, public: type) -> remote.Kind:
    errors = [base for base in public.__mro__ if issubclass(base, BaseException) and type(base) is type]
    return remote.Kind(
        name=facts["name"],
        has=frozenset(facts["has"]),
        own=frozenset(facts["own"]),
        base=_BASES.get(facts["base"]),
        public=public,
        fields={field: k for k, field in enumerate(facts["fields"] or ()) if type(field) is str},
        local=(frozenset(dir(errors[0])) | {"__notes__"}) - {"__dict__"} if errors else _NO_NAMES,
        quick=facts["quick"] is True,
        checks=facts["checks"] is True,
    )


def _weak(bases: list) -> bool:
    return any(type(base) is not type and base.__weakrefoffset__ for base in bases)


def _space(facts: dict, names: frozenset[str], error: Any = None) -> dict[str, Any]:
    """The attributes of a stand-in's class."""
    space = {name: SPECIAL_METHODS[name] for name in names if name in SPECIAL_METHODS}
    space.update(
        {
            "__module__": facts["module"],
            "__getattribute__": _get,
            "__setattr__": _set,
            "__delattr__": _delete,
            "__eq__": methods.equal,
            "__ne__": methods.unequal,
            "__hash__": _hash_of(facts),
            "__doc__": _Doc,
            "__reduce_ex__": _reduce,
            "__dir__": _directory,
        }
    )
    immutable = _BASES.get(facts["base"]) in IMMUTABLE
    if error is not None or immutable:  # made from the same value as the original, so it is shown alike
        space.update({name: method for name, method in TEXT_METHODS.items() if name in facts["own"]})
    else:
        space.update(TEXT_METHODS)
    if error is not None and "__str__" in facts["own"]:
        space["__str__"] = _text_of_error
    if immutable and not names & {"__eq__", "__ne__"}:
        for each in ("__eq__", "__ne__", "__hash__"):
            del space[each]
    return space


def _hash_of(facts: dict) -> Any:
    if facts["unhashable"]:
        return None
    return methods.forward("hash") if "__hash__" in facts["has"] else object.__hash__


def _meta_of(names: frozenset[str], bases: list) -> Any:
    """The class of a stand-in for a class. It may give the class a length, items and members."""
    above = tuple(dict.fromkeys(type(base) for base in bases if issubclass(type(base), ForeignType)))
    if not names:
        return above[0] if above else ForeignType
    key = names, above
    if key not in remote.registry.metas:
        space = {name: TEXT_METHODS.get(name, SPECIAL_METHODS.get(name)) for name in names}
        made = type.__new__(type, "type", above or (ForeignType,), space)
        remote.registry.metas[key] = made
        remote.registry.kinds[made] = remote.Kind("type", names, names, None, made, {}, _NO_NAMES, False, False)
    return remote.registry.metas[key]


def _common(public: type, has: frozenset[str]) -> tuple[type, remote.Kind]:
    """The class of stand-ins for the program's instances of one of the `COMMON_TYPES`."""
    facts = {"name": public.__name__, "module": "builtins", "has": has, "own": has, "base": None, "unhashable": False}
    made = _of(public.__name__, (), {**_space(facts, has), "__slots__": ("__weakref__",)})
    return made, remote.Kind(public.__name__, has, has, None, public, {}, _NO_NAMES, False, False)


_CALLABLE = frozenset(("__call__",))
COMMON: dict[str, tuple[type, remote.Kind]] = {
    public.__name__: _common(public, _NO_NAMES if public is types.ModuleType else _CALLABLE) for public in COMMON_TYPES
}
