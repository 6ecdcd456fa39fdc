"""Finds the installed packages that programs may import: numpy, those that the user names, and what these require."""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


DEFAULT = "numpy"


@dataclass
class Packages:
    """
    Installed packages that programs may import.

    Attributes:
        modules (`dict[str, str]`): Path of each top-level module by name: a file, or a package's folder.
        readable (`list[str]`): Files and folders of the packages.
        load (`list[str]`): Modules that are imported once, before programs that import them start.
    """

    modules: dict[str, str] = field(default_factory=dict)
    readable: list[str] = field(default_factory=list)
    load: list[str] = field(default_factory=list)


def find_packages(names: Sequence[str]) -> Packages:
    """
    Finds installed packages and what they require.

    Args:
        names (`Sequence[str]`): Names for importing (`"sklearn"`) or for installing (`"scikit-learn"`).

    Returns:
        `Packages`: The named packages, what they require, and numpy if it is installed.

    Raises:
        ValueError: If `names` is not a list of names, or if a package is not installed.
    """
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"packages={names!r} must be a list of names. Set packages=['pandas'], for example.")
    found = Packages()
    if names:
        providers = importlib.metadata.packages_distributions()
        distributions: dict[str, None] = {}
        for name in names:
            _add_required(_distributions(name, providers, names), distributions)
        for module, owners in providers.items():
            if any(canonicalize_name(owner) in distributions for owner in owners):
                _add_module(module, found)
        named = {canonicalize_name(name) for name in names}
        for module, owners in providers.items():
            if module in found.modules and (module in names or named & {canonicalize_name(owner) for owner in owners}):
                found.load.append(module)
    if DEFAULT not in found.modules:
        _add_module(DEFAULT, found)
    if DEFAULT in found.modules and DEFAULT not in found.load:
        found.load.append(DEFAULT)
    return found


@lru_cache(maxsize=16)
def importable(names: tuple[str, ...] = ()) -> frozenset[str]:
    """Top-level modules besides those of the standard library that tests and programs may import with these `packages`."""
    return frozenset(find_packages(names).modules)


def missing(imports: Iterable[str], modules: Container[str]) -> list[str]:
    """Those of the modules that tests import which are neither in the standard library nor in `modules`."""
    return [name for name in imports if name not in sys.stdlib_module_names and name not in modules]


def fault_of_imports(imports: Iterable[str], modules: Container[str]) -> str | None:
    """
    Finds an import of tests that the sandbox refuses.

    Args:
        imports (`Iterable[str]`): Top-level modules that tests import.
        modules (`Container[str]`): Those that they may import besides the standard library.

    Returns:
        `str` or `None`: The package and what to do about it, in one line; `None` if all may be imported.
    """
    for name in missing(imports, modules):
        if importlib.util.find_spec(name) is None:
            return (
                f"the tests import {name!r}, which is not installed: install it and set packages=[{name!r}], or, if it is the "
                "program, write 'from solution import ...'"
            )
        return f"the tests import {name!r}, which needs packages=[{name!r}]: set it in the configuration or in the executor"
    return None


def _distributions(name: str, providers: Mapping[str, list[str]], names: Sequence[str]) -> list[str]:
    owners = providers.get(name)
    if owners:
        return list(owners)
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"packages={list(names)!r}: {name!r} is not installed. Install it, or remove it from packages."
        ) from None
    return [name]


def _add_required(names: Iterable[str], distributions: dict[str, None]) -> None:
    """Adds distributions and those that they require, if they are installed."""
    todo = list(names)
    while todo:
        name = canonicalize_name(todo.pop())
        if name in distributions:
            continue
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        distributions[name] = None
        for text in required:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)


def _add_module(name: str, found: Packages) -> None:
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        return
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if not places and spec.origin is not None and spec.has_location:
        places = [Path(spec.origin)]
    if not places:
        return
    found.modules[name] = str(places[0])
    for path in (*places, *(place.with_name(f"{name}.libs") for place in places)):
        if path.exists():
            found.readable.append(str(path))
