"""Kafka's frames on a socket: a length of four bytes, then as many."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable


def read(source: socket.socket) -> bytes:
    """The next frame, without its length.

    Raises:
        EOFError: the other side left.
        OSError: the connection broke.
    """
    (size,) = struct.unpack(">i", _exactly(source, 4))
    return _exactly(source, size)


def write(sink: socket.socket, frame: bytes) -> None:
    """Send ``frame`` behind its length."""
    sink.sendall(struct.pack(">i", len(frame)) + frame)


def pump(source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes]) -> None:
    """Pass on what comes, as ``change`` makes it, until one side leaves; then both have."""
    try:
        while True:
            write(sink, change(read(source)))
    except (OSError, EOFError):
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _exactly(source: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = source.recv(size - len(found))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)
