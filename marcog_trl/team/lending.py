"""Other values of attributes, for a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def lent(owner: Any, **values: Any) -> Iterator[None]:
    """Lends an object other values of its attributes, and gives its own back."""
    own = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(own)
