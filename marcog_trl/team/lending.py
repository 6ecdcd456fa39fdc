"""Other values of attributes, for a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def lent(owner: Any, **values: Any) -> Iterator[None]:
    """Lends an object other values of its attributes, and takes them back."""
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(own)
