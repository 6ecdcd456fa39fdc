"""What the processes send to one another: frames of JSON, and Python values in them. Knows nothing about jobs or tests."""

from .codec import NODES, Codec
from .frames import (
    HEADER,
    LARGEST,
    LARGEST_ANSWER,
    LONGEST_WAIT,
    TIMEOUT,
    BrokenChannel,
    FrameReader,
    parse,
    read_exactly,
    receive,
    send,
    write,
)
from .values import MOST_FIELDS, TYPE_NAMES, Uncrossable


__all__ = [
    "HEADER",
    "LARGEST",
    "LARGEST_ANSWER",
    "LONGEST_WAIT",
    "MOST_FIELDS",
    "NODES",
    "TIMEOUT",
    "TYPE_NAMES",
    "BrokenChannel",
    "Codec",
    "FrameReader",
    "Uncrossable",
    "parse",
    "read_exactly",
    "receive",
    "send",
    "write",
]
