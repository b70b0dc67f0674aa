"""Kafka's clients against a broker that demands TLS, certificates, passwords or tokens."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from decoder.contracts.errors import SettingsError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from decoder.kafka.clients import AWAY, close, fetch, open_admin, open_consumer, open_producer
from decoder.kafka.sender import open_sender
from decoder.kafka.tokens import Tokens
from tests.conftest import until
from tests.demanding import Demands, demanding
from tests.learner.conftest import Broker
from tests.learner.stage import WARNINGS

pytestmark = WARNINGS
PASSWORD = "correct horse"


@dataclass(frozen=True)
class Papers:
    """Files that prove who is who; the client's key is under :data:`PASSWORD`."""

    ca: Path
    cert: Path
    key: Path
    server: ssl.SSLContext
    mutual: ssl.SSLContext


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("papers")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    client = ca.issue_cert("worker@example.org")
    client.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    key = load_pem_private_key(client.private_key_pem.bytes(), None)
    secret = BestAvailableEncryption(PASSWORD.encode())
    written = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret)
    (folder / "key.pem").write_bytes(written)
    contexts = []
    for verify in (ssl.CERT_NONE, ssl.CERT_REQUIRED):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ca.issue_cert("127.0.0.1").configure_cert(context)
        ca.configure_trust(context)
        context.verify_mode = verify
        contexts.append(context)
    names = [folder / name for name in ("ca.pem", "cert.pem", "key.pem")]
    return Papers(names[0], names[1], names[2], contexts[0], contexts[1])


class Issuer(BaseHTTPRequestHandler):
    """Gives who knows the secret a token, and counts them."""

    issued: list[str]

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        # the id and secret "id:secret", as RFC 7617 writes them
        known = self.headers["Authorization"] == "Basic aWQ6c2VjcmV0"
        ok = known and asked == "grant_type=client_credentials&scope=kafka"
        body = b'{"access_token": "good", "expires_in": 3600}' if ok else b"{}"
        self.issued.append(asked)
        self.send_response(200 if ok else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def issuer() -> Iterator[tuple[str, list[str]]]:
    handler = type("Counting", (Issuer,), {"issued": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/token", handler.issued
    server.shutdown()
    thread.join()
    server.server_close()


def sends(kafka: KafkaSettings, value: bytes, welcome: bool = True) -> bool:
    """Whether a worker's client gets a record through, which it tries until it says what is wrong;
    who is ``welcome`` is let in at last."""
    said: list[str] = []
    sender = open_sender(kafka, "test", lambda error: said.append(str(error)))
    sender.produce(DRAFTS.name, value=value)
    until(lambda: not sender.flush(1.0) or (said and not welcome), "its word")
    assert not any("secret" in each or PASSWORD in each for each in said)
    left = len(sender)
    sender.purge()
    return not left


def is_turned_away(kafka: KafkaSettings) -> bool:
    """Whether neither a client of ours nor a worker's gets through."""
    with pytest.raises(AWAY):
        open_admin(kafka, "test", 1_000)
    return not sends(kafka, b"never", welcome=False)


def exchange(kafka: KafkaSettings) -> list[bytes]:
    """What lies on the topic after each kind of client has been used once."""
    admin = open_admin(kafka, "test", 60_000)
    assert DRAFTS.name in admin.list_topics()
    close(admin)
    producer = open_producer(kafka, "test", max_block_ms=60_000)
    producer.send(DRAFTS.name, value=b"numbers").get(300)
    close(producer)
    assert sends(kafka, b"more")
    consumer = open_consumer(kafka, "test")
    consumer.subscribe([DRAFTS.name])
    found: list[bytes] = []
    until(lambda: found.extend(r.value for r in fetch(consumer, 50)) or len(found) > 1)
    close(consumer)
    return found


def test_a_broker_with_tls_is_reached(broker: Broker, papers: Papers) -> None:
    with demanding(broker.port, Demands(papers.server)) as port:
        kafka = KafkaSettings(
            bootstrap_servers=f"127.0.0.1:{port}", security_protocol="SSL", ssl_cafile=papers.ca
        )
        assert exchange(kafka) == [b"numbers", b"more"]
        unknown = kafka.model_copy(update={"ssl_cafile": None})
        assert is_turned_away(unknown), "one whose certificate nobody vouches for"


def test_a_client_certificate_with_an_encrypted_key_is_sent(broker: Broker, papers: Papers) -> None:
    given = {
        "security_protocol": "SSL",
        "ssl_cafile": papers.ca,
        "ssl_certfile": papers.cert,
        "ssl_keyfile": papers.key,
    }
    with demanding(broker.port, Demands(papers.mutual)) as port:
        where = f"127.0.0.1:{port}"
        kafka = KafkaSettings(bootstrap_servers=where, ssl_password=PASSWORD, **given)
        assert exchange(kafka) == [b"numbers", b"more"]
        bare = KafkaSettings(bootstrap_servers=where, security_protocol="SSL", ssl_cafile=papers.ca)
        assert is_turned_away(bare)
    for wrong in ({}, {"ssl_password": "wrong"}):
        with pytest.raises(SettingsError, match="is HVD_KAFKA_SSL_PASSWORD its password"):
            KafkaSettings.load(**given, **wrong)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_password_is_sent(mechanism: str, broker: Broker, papers: Papers) -> None:
    demands = Demands(papers.server, mechanism, users={"hvd": "secret"})
    with demanding(broker.port, demands) as port:
        kafka = KafkaSettings(
            bootstrap_servers=f"127.0.0.1:{port}",
            security_protocol="SASL_SSL",
            sasl_mechanism=mechanism,
            sasl_plain_username="hvd",
            sasl_plain_password="secret",
            ssl_cafile=papers.ca,
        )
        assert exchange(kafka) == [b"numbers", b"more"]
        other = kafka.model_copy(update={"sasl_plain_password": "another secret"})
        assert is_turned_away(other)
        bare = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
        with pytest.raises(AWAY):
            open_admin(bare, "test", 1_000)


TOKEN = Demands(mechanism="OAUTHBEARER", tokens=frozenset({"good"}))


def bearing(port: int, **given: Any) -> KafkaSettings:
    """Who shows a token there."""
    demanded = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": TOKEN.mechanism}
    return KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}", **demanded, **given)


def test_a_token_is_read_from_its_file_each_time(broker: Broker, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("good\n")
    with demanding(broker.port, TOKEN) as port:
        kafka = bearing(port, sasl_oauth_token_file=file)
        assert exchange(kafka) == [b"numbers", b"more"]
        file.write_text("stale")
        assert is_turned_away(kafka)
        file.unlink()
        with pytest.raises(AWAY):
            open_admin(kafka, "test", 1_000)
        with pytest.raises(AWAY, match="no token for Kafka"):
            Tokens(kafka).token()


def test_a_token_is_fetched_once_for_a_client(
    broker: Broker, issuer: tuple[str, list[str]]
) -> None:
    url, issued = issuer
    with demanding(broker.port, TOKEN) as port:
        kafka = bearing(
            port, sasl_oauth_token_url=url, sasl_oauth_client_id="id",
            sasl_oauth_client_secret="secret", sasl_oauth_scope="kafka",
        )  # fmt: skip
        assert exchange(kafka) == [b"numbers", b"more"]
        assert len(issued) == 4  # an admin client, two producers and a consumer
        other = kafka.model_copy(update={"sasl_oauth_client_secret": "other"})
        with pytest.raises(AWAY, match="gives no token for Kafka"):
            Tokens(other).token()
        with pytest.raises(AWAY, match="gives no token for Kafka"):
            sends(other, b"never")
