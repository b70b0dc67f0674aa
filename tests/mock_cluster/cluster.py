"""librdkafka's mock cluster: brokers of another make than the embedded one, which do what they are
told.

It comes with the ``confluent-kafka`` wheel and runs in threads of this process; any client can
reach it. Its interface is C (``rdkafka_mock.h``). It holds records in memory, knows neither
clean-up, nor settings of topics, nor how to make them by a client's word, and stores records as
they came.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import files
from types import MappingProxyType
from typing import Final
from uuid import uuid4

from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import TOPICS
from decoder.kafka.clients import close, layout_of, open_consumer, partitions_of
from tests import frames
from tests.conftest import patience

HOST: Final = "127.0.0.1"
PRODUCE, FETCH, METADATA, VERSIONS = 0, 1, 3, 18
"""Requests, by Kafka's numbers."""
KNOWN_VERSIONS: Final = 2
"""Of the request for versions: what asks in a newer one gets an answer that no client can read,
where Kafka answers in the oldest one (KIP-511)."""
SYNC: Final = 14
GROUPS: Final = {11: 5, 12: 3, 13: 1, SYNC: 3}
"""Newest versions of the requests of a consumer group that it can read, of those that it names."""
REBALANCE_MS: Final = 300
"""For more members of a group to come, when its first has."""
DISCONNECT: Final = -195
"""In the place of an error: the connection is closed without a word."""
PRODUCER: Final = 0

_Pointer = ctypes.c_void_p
_Errors = ctypes.POINTER(ctypes.c_int)
_FUNCTIONS: Final = {
    "rd_kafka_conf_new": (_Pointer, ()),
    "rd_kafka_conf_set": (
        ctypes.c_int,
        (_Pointer, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t),
    ),
    "rd_kafka_new": (_Pointer, (ctypes.c_int, _Pointer, ctypes.c_char_p, ctypes.c_size_t)),
    "rd_kafka_destroy": (None, (_Pointer,)),
    "rd_kafka_handle_mock_cluster": (_Pointer, (_Pointer,)),
    "rd_kafka_mock_cluster_bootstraps": (ctypes.c_char_p, (_Pointer,)),
    "rd_kafka_mock_topic_create": (
        ctypes.c_int, (_Pointer, ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    ),
    "rd_kafka_mock_push_request_errors_array": (
        None, (_Pointer, ctypes.c_int16, ctypes.c_size_t, _Errors),
    ),
    "rd_kafka_mock_broker_set_down": (ctypes.c_int, (_Pointer, ctypes.c_int32)),
    "rd_kafka_mock_broker_set_up": (ctypes.c_int, (_Pointer, ctypes.c_int32)),
    "rd_kafka_mock_broker_set_rtt": (ctypes.c_int, (_Pointer, ctypes.c_int32, ctypes.c_int)),
    "rd_kafka_mock_start_request_tracking": (None, (_Pointer,)),
    "rd_kafka_mock_get_requests": (
        ctypes.POINTER(_Pointer), (_Pointer, ctypes.POINTER(ctypes.c_size_t)),
    ),
    "rd_kafka_mock_request_api_key": (ctypes.c_int16, (_Pointer,)),
    "rd_kafka_mock_request_destroy_array": (None, (ctypes.POINTER(_Pointer), ctypes.c_size_t)),
    "rd_kafka_mock_group_initial_rebalance_delay_ms": (None, (_Pointer, ctypes.c_int32)),
    "rd_kafka_mock_partition_set_leader": (
        ctypes.c_int, (_Pointer, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32),
    ),
}  # fmt: skip


def _library() -> ctypes.CDLL:
    (path,) = {p.locate() for p in files("confluent-kafka") or () if p.match("*.libs/librdkafka*")}
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class MockCluster:
    """Brokers numbered from 1. ``kafka`` is how our clients reach them, ``servers`` how
    librdkafka's own do.
    """

    def __init__(self, brokers: int) -> None:
        self._lib, said = _library(), ctypes.create_string_buffer(512)
        settings = self._lib.rd_kafka_conf_new()
        for name, value in ((b"test.mock.num.brokers", brokers), (b"log_level", 0)):
            told = str(value).encode()
            assert not self._lib.rd_kafka_conf_set(settings, name, told, said, len(said))
        self._client = self._lib.rd_kafka_new(PRODUCER, settings, said, len(said))
        assert self._client, said.value
        self._cluster = self._lib.rd_kafka_handle_mock_cluster(self._client)
        self.servers = self._lib.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        self._lib.rd_kafka_mock_start_request_tracking(self._cluster)
        self._lib.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, REBALANCE_MS)
        self._brokers = range(1, brokers + 1)
        self._fronts = [_Front(int(each.rpartition(":")[2])) for each in self.servers.split(",")]
        for front in self._fronts:
            front.listen({each.behind: each.port for each in self._fronts})
        addresses = ",".join(f"{HOST}:{front.port}" for front in self._fronts)
        self.kafka = KafkaSettings(bootstrap_servers=addresses)

    def close(self) -> None:
        """End it, and every connection."""
        for front in self._fronts:
            front.close()
        self._lib.rd_kafka_destroy(self._client)

    def make_topic(self, name: str, partitions: int = 1) -> None:
        """Make a topic."""
        call = self._lib.rd_kafka_mock_topic_create
        assert not call(self._cluster, name.encode(), partitions, len(self._brokers))

    def answer(self, request: int, *errors: int) -> None:
        """Answer the next requests of this kind with ``errors``, by Kafka's codes, one each.

        What is so answered is not done: no record is kept.
        """
        codes = (ctypes.c_int * len(errors))(*errors)
        self._lib.rd_kafka_mock_push_request_errors_array(
            self._cluster, request, len(errors), codes
        )

    def asked(self, request: int) -> int:
        """Requests of this kind that have come."""
        count = ctypes.c_size_t()
        found = self._lib.rd_kafka_mock_get_requests(self._cluster, ctypes.byref(count))
        key = self._lib.rd_kafka_mock_request_api_key
        kinds = [key(found[at]) for at in range(count.value)]
        self._lib.rd_kafka_mock_request_destroy_array(found, count)
        return kinds.count(request)

    def delay(self, milliseconds: int) -> None:
        """Answer only after so long what is done at once."""
        for broker in self._brokers:
            self._lib.rd_kafka_mock_broker_set_rtt(self._cluster, broker, milliseconds)

    def down(self, *brokers: int) -> None:
        """Close the connections of ``brokers``, or of all, and take no new one."""
        for broker in brokers or self._brokers:
            self._lib.rd_kafka_mock_broker_set_down(self._cluster, broker)

    def up(self) -> None:
        """Take connections again; records are still there."""
        for broker in self._brokers:
            self._lib.rd_kafka_mock_broker_set_up(self._cluster, broker)

    def make_anew(self, topic: str) -> None:
        """Name another id for a topic; its records are still there."""
        consumer = open_consumer(self.kafka, "test")
        partitions_of(consumer, topic)
        topic_id, _ = layout_of(consumer, topic)
        close(consumer)
        made = uuid4().bytes  # one for all brokers: else it changes with whoever is asked
        for front in self._fronts:
            front.changes[topic_id.bytes] = made

    def lead(self, topic: str, partition: int, broker: int) -> None:
        """Make ``broker`` the leader of a partition."""
        call = self._lib.rd_kafka_mock_partition_set_leader
        assert not call(self._cluster, topic.encode(), partition, broker)


@contextmanager
def running(
    brokers: int = 1, partitions: int = 1, more: Mapping[str, int] = MappingProxyType({})
) -> Iterator[MockCluster]:
    """A cluster with the project's topics; those in ``more`` have so many partitions."""
    cluster = MockCluster(brokers)
    try:
        for topic in TOPICS:
            cluster.make_topic(topic.name, more.get(topic.name, partitions))
        with patience():
            yield cluster
    finally:
        cluster.close()


class _Front:
    """Before one broker: answers newer requests for versions as Kafka does, and names the fronts
    where brokers are named; ``changes`` are made in answers. All else goes through as it is.
    """

    def __init__(self, behind: int) -> None:
        self.behind = behind
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self.changes: dict[bytes, bytes] = {}

    def listen(self, ports: dict[int, int]) -> None:
        self.changes = {_address(behind): _address(front) for behind, front in ports.items()}

        def changed(frame: bytes) -> bytes:
            for behind, front in list(self.changes.items()):
                frame = frame.replace(behind, front)
            return frame

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = self._listener.accept()
                    threading.Thread(target=serve, args=(client,), daemon=True).start()

        def serve(client: socket.socket) -> None:
            with contextlib.suppress(OSError, EOFError), contextlib.ExitStack() as stack:
                stack.enter_context(client)
                broker = stack.enter_context(socket.create_connection((HOST, self.behind)))
                first = _agreed(client)
                frames.write(broker, first)
                if struct.unpack_from(">h", first) == (VERSIONS,):
                    frames.write(client, _readable(frames.read(broker)))
                threading.Thread(
                    target=frames.pump, args=(broker, client, changed), daemon=True
                ).start()
                frames.pump(client, broker, _late)

        threading.Thread(target=accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _address(port: int) -> bytes:
    return HOST.encode() + struct.pack(">i", port)


def _readable(answer: bytes) -> bytes:
    """What the mock cluster says of versions, without those that it says and cannot read."""
    told = bytearray(answer)
    (count,) = struct.unpack_from(">i", told, 6)
    for at in range(10, 10 + 6 * count, 6):
        key, least, most = struct.unpack_from(">hhh", told, at)
        struct.pack_into(">hhh", told, at, key, least, min(most, GROUPS.get(key, most)))
    return bytes(told)


def _late(frame: bytes) -> bytes:
    """A leader's word of who gets what, half a second after it was said: of members who ask later
    than that the mock cluster knows nothing, where Kafka tells them."""
    if struct.unpack_from(">h", frame) == (SYNC,):
        at = 8
        for behind in (0, 4, 0, 0):  # names of client, group (and its generation), member, instance
            (length,) = struct.unpack_from(">h", frame, at)
            at += 2 + max(length, 0) + behind
        if struct.unpack_from(">i", frame, at) > (0,):
            time.sleep(0.5)
    return frame


def _agreed(client: socket.socket) -> bytes:
    """The first request that the mock cluster understands."""
    unsupported = 35
    while True:
        frame = frames.read(client)
        key, version = struct.unpack_from(">hh", frame)
        if key != VERSIONS or version <= KNOWN_VERSIONS:
            return frame
        frames.write(client, frame[4:8] + struct.pack(">hi", unsupported, 0))
