"""Length-prefixed JSON frames over a socket."""

import json
import select
import socket
import struct
import time
from typing import Any


HEADER = struct.Struct("<I")
LARGEST = 16 << 20  # bytes in a frame
LARGEST_ANSWER = 2 << 20  # bytes in a frame whose value is compared with a literal
LONGEST_WAIT = 3600.0  # seconds per call of poll(), which takes no more than 2 million

TIMEOUT = object()

# Made once: `json.dumps` with separators makes an encoder per call, and `json.loads` calls several functions of Python. Each
# function costs a child a page of memory, because it is called there for the first time.
_encode = json.JSONEncoder(separators=(",", ":")).encode
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


class BrokenChannel(Exception):
    """The peer sent something that no honest peer sends."""


def write(value: Any) -> bytes:
    """A value as JSON."""
    return _encode(value).encode()


def send(sock: socket.socket, value: Any, largest: int = LARGEST) -> None:
    """Sends one frame; raises BrokenChannel if it would be larger than `largest` bytes."""
    body = write(value)
    if len(body) > largest:
        raise BrokenChannel(f"a message of {len(body)} bytes is larger than {largest}")
    sock.sendall(HEADER.pack(len(body)) + body)


def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Reads `count` bytes; raises EOFError if the peer closes the channel first."""
    data = sock.recv(count)
    if len(data) == count:
        return data
    pieces, missing = [data], count - len(data)
    while missing and pieces[-1]:
        pieces.append(sock.recv(min(missing, 1 << 20)))
        missing -= len(pieces[-1])
    if missing:
        raise EOFError("the peer closed the channel")
    return b"".join(pieces)


def receive(sock: socket.socket, largest: int = LARGEST) -> Any:
    """The next frame, after which nothing may follow before an answer; raises EOFError if the peer is gone, and BrokenChannel
    if it sent anything but a frame."""
    data = sock.recv(1 << 16)
    if len(data) < HEADER.size:
        data += read_exactly(sock, HEADER.size - len(data)) if data else b""
        if not data:
            raise EOFError("the peer closed the channel")
    (size,) = HEADER.unpack_from(data)
    if size > largest:
        raise BrokenChannel(f"a message of {size} bytes is larger than {largest}")
    missing = HEADER.size + size - len(data)
    if missing < 0:
        raise BrokenChannel("more than one message")
    return parse(data[HEADER.size :] + (read_exactly(sock, missing) if missing else b""))


def parse(body: bytes) -> Any:
    """Parses JSON; raises BrokenChannel if it is malformed."""
    try:
        value, end = _scan(body.decode("ascii"), 0)
    except (ValueError, StopIteration, RecursionError, MemoryError) as error:
        raise BrokenChannel(f"not a message: {type(error).__name__}") from None
    if end != len(body):
        raise BrokenChannel("not a message: it goes on after its end")
    return value


class FrameReader:
    """Reads frames of at most `largest` bytes from a peer that may lie, stall or vanish."""

    def __init__(self, sock: socket.socket, largest: int = LARGEST):
        self.sock = sock
        self.largest = largest
        self.buffer = bytearray()
        self.size = 0  # bytes of the last frame
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)

    def receive(self, deadline: float) -> Any:
        """The next frame, or `TIMEOUT` if `deadline` (seconds on the monotonic clock) passes first. Raises what the
        function `receive` raises."""
        while True:
            frame = self.take()
            if frame is not None:
                return frame
            left = deadline - time.monotonic()
            if left <= 0:
                return TIMEOUT
            if self.poll.poll(min(left, LONGEST_WAIT) * 1000):
                self.fill()

    def fill(self) -> None:
        """Reads what has arrived, without waiting for more; raises EOFError if the peer is gone."""
        try:
            data = self.sock.recv(1 << 18, socket.MSG_DONTWAIT)
        except BlockingIOError:  # an urgent byte, which poll reports and recv does not return
            time.sleep(0.001)
            return
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError("the peer closed the channel")
        self.buffer += data

    def take(self) -> Any:
        """A frame that has arrived as a whole, or `None`."""
        if len(self.buffer) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self.buffer)
        if size > self.largest:
            raise BrokenChannel(f"a message of {size} bytes is larger than {self.largest}")
        if len(self.buffer) < HEADER.size + size:
            return None
        self.size = size
        body = bytes(self.buffer[HEADER.size : HEADER.size + size])
        del self.buffer[: HEADER.size + size]
        frame = parse(body)
        if frame is None:
            raise BrokenChannel("an empty message")
        return frame
