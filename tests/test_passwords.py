"""A password that stands in an address is shown nowhere: no error, log, page, report, tag."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from decoder.contracts import errors
from decoder.contracts.errors import (
    HvdError,
    PolicyRefused,
    RegistryError,
    SchemaUnknown,
    SettingsError,
)
from decoder.contracts.masking import masked, without_login
from decoder.contracts.settings import KafkaSettings
from decoder.kafka.tokens import Tokens
from learner.__main__ import main
from learner.release.registry import Registry
from learner.settings import LearnerSettings
from pipelines import doctor
from pipelines.lab.bench.serve.setups import masked_variables
from pipelines.stack.running import TRACKING_VARIABLE

# mlflow uses parts of sqlalchemy that are to go; that is theirs to mend
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PASSWORD = "hunter/2@x"
NOWHERE = f"http://anna:{PASSWORD}@127.0.0.1:9"


@pytest.mark.parametrize(
    "address",
    [
        NOWHERE,
        "http://anna:hunter2@host:5000/#/models",
        "postgresql+psycopg2://mlflow:hunter2@db/mlflow",
        "postgresql://db/mlflow?user=a&password=hunter2&sslmode=on",
        "s3://bucket/a?X-Amz-Credential=hunter2&X-Amz-Signature=hunter2",
        "https://hunter2@host",
        "SASL_SSL://a:hunter2@one:9092,SASL_SSL://b:hunter2@two:9092",
        "postgresql://mlflow:x'hunter2@db:5432/mlflow",
        'postgresql://mlflow:x"hunter2@db:5432/mlflow',
        "postgresql://mlflow:x hunter2@db:5432/mlflow",
        "postgresql://mlflow:x<hunter2@db:5432/mlflow",
        "postgresql://mlflow:x>hunter2@db:5432/mlflow",
    ],
)
def test_of_an_address_the_host_is_left(address: str) -> None:
    for text in (address, f'no answer of {address!r}, of "{address}" and <{address}>'):
        assert "hunter" not in masked(text) and masked(masked(text)) == masked(text)
    assert masked(address).partition("://")[0] == address.partition("://")[0]


def test_what_holds_no_secret_is_left_as_it_is() -> None:
    for text in (
        "http://host:5000/a?b=c", "mail a@b about http://host", "sqlite:///a/b.db", "",
        "http://host:5000 says: mail a@b", "kafka://one:9092, then mail a@b", "http://[::1]/ a@b",
    ):  # fmt: skip
        assert masked(text) == text == without_login(text)
    assert without_login("http://a:b@host:5000") == "http://host:5000"


def test_a_long_text_of_many_addresses_holds_nobody_up() -> None:
    """It may come from anybody: a policy's array of such a name held a server up for hours."""
    for part in ("://a", "://a:b", "://a: "):
        assert masked(part * 300_000) == part * 300_000


@pytest.mark.parametrize("password", ["12 hunter2", "12/'hunter2", "12%20hunter2"])
def test_what_the_registry_raises_holds_no_password_that_its_parser_finds(password: str) -> None:
    """In text this one begins as a port does."""
    with pytest.raises(RegistryError) as raised:
        Registry(f"postgresql://mlflow:{password}@127.0.0.1:9/mlflow").standings()
    assert "hunter" not in str(raised.value) and "127.0.0.1:9/mlflow" in str(raised.value)


def kinds(of: type[HvdError] = HvdError) -> Iterator[type[HvdError]]:
    yield of
    for kind in of.__subclasses__():
        yield from kinds(kind)


def test_no_error_of_ours_holds_one() -> None:
    assert {kind.__name__ for kind in kinds()} >= {
        name for name in dir(errors) if name.endswith(("Error", "Refused"))
    }
    for kind in kinds():
        first = ["malformed"] if kind in (PolicyRefused, SchemaUnknown) else []
        error = kind(*first, f"no answer of {NOWHERE}")
        assert PASSWORD not in f"{error} {error!r}" and "127.0.0.1:9" in str(error)


@pytest.mark.parametrize(
    "servers", ["SASL_SSL://a:hunter2@host:9092", "a:hunter2@host:9092", "SSL://" + "hunter2" * 30]
)
def test_servers_pasted_with_a_password_are_refused_without_it(
    servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "@" not in servers:
        servers += "@host:9092"
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", servers)
    with pytest.raises(SettingsError) as refused:
        KafkaSettings.load()
    assert "hunter" not in str(refused.value) and "host:9092" in str(refused.value)


def test_an_issuer_of_tokens_that_is_away() -> None:
    kafka = KafkaSettings(
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_url=NOWHERE,
        sasl_oauth_client_id="anna",
        sasl_oauth_client_secret="hunter",
    )
    with pytest.raises(Exception, match="no token") as failed:
        Tokens(kafka).token()
    chain: BaseException | None = failed.value
    while chain is not None:
        assert "hunter" not in str(chain)
        chain = chain.__cause__


def test_pages_doctor_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACKING_VARIABLE, NOWHERE)
    found = doctor.registry()
    assert "hunter" not in f"{found}"
    assert "127.0.0.1:9" in found.found
    monkeypatch.setenv(TRACKING_VARIABLE, NOWHERE.replace("http", "databricks"))
    assert "hunter" not in f"{doctor.registry()}"
    variables = {
        TRACKING_VARIABLE: NOWHERE, "HVD_KAFKA_SASL_PLAIN_PASSWORD": "hunter",
        "HVD_KAFKA_POLICY_KEY": "hunter", "VLLM_API_KEY": "hunter", "HVD_WORKER_NAME": "w",
    }  # fmt: skip
    assert "hunter" not in f"{masked_variables(variables)}"
    assert masked_variables(variables)["HVD_WORKER_NAME"] == "w"


def test_a_password_that_is_not_quoted_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACKING_VARIABLE, NOWHERE)
    with pytest.raises(SettingsError, match="%2F") as refused:
        LearnerSettings.load()
    assert "hunter" not in str(refused.value) and "127.0.0.1:9" in str(refused.value)
    quoted = "http://anna:hunter%2F2%40x@127.0.0.1:9"
    monkeypatch.setenv(TRACKING_VARIABLE, quoted)
    with pytest.raises(RegistryError) as away:
        Registry(LearnerSettings.load().mlflow_tracking_uri).standings()
    assert "hunter" not in str(away.value)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_learners_log(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = "http://anna:hunter2@127.0.0.1:9"  # a traceback shows the line that raises

    def run(*_: Any) -> None:
        try:
            raise ValueError(f"no answer of {address}")
        except ValueError as error:
            logging.getLogger("learner.release.registry").exception(
                "could not list models: %s", error
            )

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    monkeypatch.setenv("HVD_LEARNER_LOG", form)
    assert main(run) == 0
    said = capsys.readouterr().err
    assert "hunter2" not in said and said.count("***@127.0.0.1:9") == 2
