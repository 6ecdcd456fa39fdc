"""Length-prefixed JSON frames over a stream socket."""

import json
import select
import socket
import struct
import time
from typing import Any


HEADER = struct.Struct("<I")
LARGEST = 16 << 20  # bytes in a frame
TIMEOUT = object()


def send(sock: socket.socket, value: Any) -> None:
    body = json.dumps(value).encode()
    sock.sendall(HEADER.pack(len(body)) + body)


def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Reads `count` bytes; raises EOFError if the peer goes before."""
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError("the peer closed the channel")
        data += piece
    return data


def receive(sock: socket.socket) -> Any:
    """The next frame from a trusted peer, or `None` when it is gone."""
    try:
        (size,) = HEADER.unpack(read_exactly(sock, HEADER.size))
        return json.loads(read_exactly(sock, size))
    except EOFError:
        return None


class Reader:
    """Frames from an untrusted peer, with a deadline and a cap."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.buffer = bytearray()

    def receive(self, deadline: float) -> Any:
        """The next frame; `TIMEOUT` if `deadline` (on the monotonic clock) comes first; `None` if the peer is gone or
        sends what is not a frame."""
        while True:
            if len(self.buffer) >= HEADER.size:
                (size,) = HEADER.unpack_from(self.buffer)
                if size > LARGEST:
                    return None
                if len(self.buffer) >= HEADER.size + size:
                    body = bytes(self.buffer[HEADER.size : HEADER.size + size])
                    del self.buffer[: HEADER.size + size]
                    try:
                        return json.loads(body)
                    except (ValueError, RecursionError):
                        return None
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.sock], [], [], left)[0]:
                return TIMEOUT
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self.buffer += data
