"""Stands in front of a broker that asks nobody for anything, and demands TLS, SASL, or both.

It speaks as much of Kafka's protocol as that takes: it answers the handshake and the
authentication, says in ``ApiVersions`` that it knows them, and puts its own port in place of the
broker's wherever that is named. Everything else goes through as it is.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from scramp import ScramException, ScramMechanism

from tests import frames

HOST = "127.0.0.1"
HANDSHAKE, VERSIONS, AUTHENTICATE = 17, 18, 36
UNSUPPORTED_VERSION, UNSUPPORTED_MECHANISM, REFUSED = 35, 33, 58


@dataclass(frozen=True)
class Demands:
    """``mechanism`` is asked for unless it is ""; ``users`` have passwords, ``tokens`` hold."""

    tls: ssl.SSLContext | None = None
    mechanism: str = ""
    users: Mapping[str, str] = field(default_factory=dict)
    tokens: frozenset[str] = frozenset()


class Refused(Exception):
    """A client that does not give what is demanded."""


@contextmanager
def demanding(broker_port: int, demands: Demands) -> Iterator[int]:
    """Listen until the block ends; yields the port."""
    listener = socket.create_server((HOST, 0))
    threading.Thread(target=_accept, args=(listener, broker_port, demands), daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _accept(listener: socket.socket, broker_port: int, demands: Demands) -> None:
    own = listener.getsockname()[1]
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(
            target=_serve, args=(client, own, broker_port, demands), daemon=True
        ).start()


def _serve(client: socket.socket, own: int, broker_port: int, demands: Demands) -> None:
    with contextlib.suppress(OSError, Refused, EOFError), contextlib.ExitStack() as stack:
        stack.enter_context(client)
        client.settimeout(300)
        if demands.tls is not None:
            client = stack.enter_context(demands.tls.wrap_socket(client, server_side=True))
        broker = stack.enter_context(socket.create_connection((HOST, broker_port), timeout=300))
        if demands.mechanism:
            _authenticate(client, broker, demands)
        named = HOST.encode() + struct.pack(">i", broker_port)
        ours = HOST.encode() + struct.pack(">i", own)
        threading.Thread(
            target=frames.pump, args=(broker, client, lambda frame: frame.replace(named, ours)),
            daemon=True,
        ).start()  # fmt: skip
        frames.pump(client, broker, lambda frame: frame)


def _authenticate(client: socket.socket, broker: socket.socket, demands: Demands) -> None:
    """Answer until the client has shown who it is.

    Raises:
        Refused: it asked for something else before, or gave a wrong answer.
    """
    checks = _CHECKS[demands.mechanism.partition("-")[0]](demands)
    next(checks)
    while True:
        frame = frames.read(client)
        key, version, correlation, name = struct.unpack_from(">hhih", frame)
        body, head = frame[10 + max(name, 0) :], frame[4:8]
        if key == VERSIONS and version:
            frames.write(client, head + struct.pack(">hi", UNSUPPORTED_VERSION, 0))
        elif key == VERSIONS:
            frames.write(broker, frame)
            told = frames.read(broker)
            error, count = struct.unpack_from(">hi", told, 4)
            entries = [told[10 + 6 * i : 16 + 6 * i] for i in range(count)]
            entries = [e for e in entries if e[:2] not in (_short(HANDSHAKE), _short(AUTHENTICATE))]
            entries += [_short(HANDSHAKE) + _short(0) + _short(1)]
            entries += [_short(AUTHENTICATE) + _short(0) + _short(1)]
            frames.write(client, head + struct.pack(">hi", error, len(entries)) + b"".join(entries))
        elif key == HANDSHAKE:
            offered = demands.mechanism.encode()
            error = 0 if body[2:] == offered else UNSUPPORTED_MECHANISM
            frames.write(
                client,
                head + struct.pack(">hi", error, 1) + struct.pack(">h", len(offered)) + offered,
            )
        elif key == AUTHENTICATE:
            try:
                answer, done = checks.send(body[4:])
            except (ScramException, ValueError) as error:
                raise Refused(correlation) from _say_no(client, head, version, error)
            tail = struct.pack(">q", 0) if version else b""
            message = struct.pack(">hhi", 0, -1, len(answer)) + answer
            frames.write(client, head + message + tail)
            if done:
                return
        else:
            raise Refused(f"request {key} before authentication")


def _say_no(client: socket.socket, head: bytes, version: int, error: Exception) -> Exception:
    said = b"who are you?"
    tail = struct.pack(">q", 0) if version else b""
    message = struct.pack(">hh", REFUSED, len(said)) + said + struct.pack(">i", 0)
    frames.write(client, head + message + tail)
    return error


Checks = Iterator[tuple[bytes, bool]]


def _plain(demands: Demands) -> Iterator[tuple[bytes, bool]]:
    given = yield b"", False
    _, user, password = given.decode().split("\0")
    if demands.users.get(user) != password:
        raise ValueError(user)
    yield b"", True


def _scram(demands: Demands) -> Iterator[tuple[bytes, bool]]:
    mechanism = ScramMechanism(demands.mechanism)
    known = {user: mechanism.make_auth_info(word) for user, word in demands.users.items()}

    def of(user: str) -> object:
        if user not in known:
            raise ValueError(user)
        return known[user]

    server = mechanism.make_server(of)
    given = yield b"", False
    server.set_client_first(given.decode())
    given = yield server.get_server_first().encode(), False
    server.set_client_final(given.decode())
    yield server.get_server_final().encode(), True


def _oauth(demands: Demands) -> Iterator[tuple[bytes, bool]]:
    given = yield b"", False
    token = given.decode().partition("auth=Bearer ")[2].partition("\x01")[0]
    if token not in demands.tokens:
        raise ValueError(token)
    yield b"", True


_CHECKS = {"PLAIN": _plain, "SCRAM": _scram, "OAUTHBEARER": _oauth}


def _short(value: int) -> bytes:
    return struct.pack(">h", value)
