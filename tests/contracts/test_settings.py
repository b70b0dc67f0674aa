"""A setting with an unknown name or a bad value stops the process with one clear sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoder.contracts.errors import SettingsError
from decoder.contracts.settings import KafkaSettings
from decoder.settings import WorkerSettings
from learner.settings import LearnerSettings


def test_defaults_are_the_papers_table_7_but_for_longer_drafts() -> None:
    s = WorkerSettings.load()
    assert (s.suffix_max_depth, s.suffix_max_draft) == (64, 64)
    assert WorkerSettings.load(start="counting").suffix_max_factor == 2.0
    assert WorkerSettings.load(start="counting", suffix_max_factor=3).suffix_max_factor == 3.0
    assert (s.suffix_max_factor, s.suffix_max_offset, s.suffix_min_prob) == (4.0, 0.0, 0.1)


def test_another_process_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_WORKER_ENABLED", "1")
    assert KafkaSettings.load().security_protocol == "PLAINTEXT"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HVD_LEARNER_PORT", "tcp://10.96.0.7:8080"),
        ("HVD_LEARNER_PORT_8080_TCP", "tcp://10.96.0.7:8080"),
        ("HVD_LEARNER_PORT_8080_TCP_ADDR", "10.96.0.7"),
        ("HVD_LEARNER_SERVICE_HOST", "10.96.0.7"),
        ("HVD_LEARNER_SERVICE_PORT_METRICS", "8080"),
        ("HVD_API_SERVICE_PORT", "8000"),
    ],
)
def test_what_kubernetes_says_of_a_service_is_no_setting(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, value)
    assert LearnerSettings.load().port is None
    assert f"{name} belongs to a Kubernetes service" in caplog.text
    monkeypatch.setenv("HVD_LEARNER_PORT", "8080")
    assert LearnerSettings.load().port == 8080


def test_several_brokers_and_no_password_in_the_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", "a:1,b:2")
    monkeypatch.setenv("HVD_KAFKA_SASL_PLAIN_PASSWORD", "secret")
    settings = KafkaSettings.load()
    assert settings.client_options()["bootstrap_servers"] == ["a:1", "b:2"]
    assert "secret" not in repr(settings)


def test_sides_are_named_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkerSettings.load().variants == ("plain",)
    monkeypatch.setenv("HVD_WORKER_VARIANTS", "suffix, plain,suffix")
    assert WorkerSettings.load().variants == ("suffix", "plain")
    monkeypatch.setenv("HVD_WORKER_VARIANTS", "")
    assert WorkerSettings.load().variants == ()


def test_a_secret_comes_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HVD_SECRETS_DIR", str(tmp_path))
    monkeypatch.setenv("HVD_KAFKA_SECURITY_PROTOCOL", "SASL_PLAINTEXT")
    monkeypatch.setenv("HVD_KAFKA_SASL_MECHANISM", "SCRAM-SHA-512")
    monkeypatch.setenv("HVD_KAFKA_SASL_PLAIN_USERNAME", "hvd")
    (tmp_path / "hvd_kafka_sasl_plain_password").write_text("secret\n")
    assert KafkaSettings.load().client_options()["sasl_plain_password"] == "secret"
    (tmp_path / "hvd_kafka_sasl_plain_pasword").write_text("secret")
    with pytest.raises(SettingsError, match="Did you mean HVD_KAFKA_SASL_PLAIN_PASSWORD"):
        KafkaSettings.load()
    monkeypatch.setenv("HVD_SECRETS_DIR", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match=r"HVD_SECRETS_DIR names .*none, which is not a folder"):
        KafkaSettings.load()


SASL = {"SECURITY_PROTOCOL": "SASL_SSL"}
OAUTH = {**SASL, "SASL_MECHANISM": "OAUTHBEARER"}
SERVERS = (":", "a", "a:b:c", "http://[::1", "a:0", "a:1,", "http://a:1")
REFUSED: list[tuple[str, dict[str, str], str]] = [
    ("KAFKA", {"BOOTSTRAP_SERVER": "x:1"}, "Did you mean HVD_KAFKA_BOOTSTRAP_SERVERS"),
    ("WROKER", {"ENABLED": "1"}, "HVD_WROKER_ENABLED"),
    ("WORKER", {"MODEL_DRAFT_TOKENS": "many"}, "HVD_WORKER_MODEL_DRAFT_TOKENS"),
    ("WORKER", {"EVENTS_PER_S": "inf"}, "EVENTS_PER_S"),  # JSON has no such number to hand over
    ("WORKER", {"HOLDOUT": "nan"}, "HOLDOUT"),
    ("WORKER", {"SUFFIX_MAX_FACTOR": "1e10"}, "FACTOR"),  # more than the trees can count
    ("WORKER", {"NAME": "a" * 257}, "HVD_WORKER_NAME"),  # more than a record's reader takes
    ("WORKER", {"NAME": ""}, "HVD_WORKER_NAME"),
    ("WORKER", {"SIDES": "plain,champion"}, "name some of plain, suffix, model, first"),
    ("WORKER", {"HOLDOUT": "0.95"}, "HOLDOUT is not valid: .*less than or equal to 0.9"),
    ("WORKER", {"START": "cold"}, "START is not valid: .*'first' or 'counting'"),
    ("LEARNER", {"BUFFER_EVENTS": "1000000000000"}, "BUFFER_EVENTS"),
    ("LEARNER", {"ROWS_PER_SECOND": "inf"}, "ROWS_PER_SECOND"),
    *(("LEARNER", {name: value}, f"unknown setting HVD_LEARNER_{name}") for name, value in (
        ("PORTS", "8080"), ("SERVICE_PORT", "tcp"), ("PROT", "1"),  # much like Kubernetes' words
    )),
    *(("KAFKA", {"BOOTSTRAP_SERVERS": servers}, "takes host:port, several with commas")
      for servers in SERVERS),
    ("KAFKA", SASL, "SASL_MECHANISM and .* belong together"),
    ("KAFKA", {"SASL_MECHANISM": "PLAIN"}, "belong together"),
    ("KAFKA", {**SASL, "SASL_MECHANISM": "PLAIN", "SASL_PLAIN_PASSWORD": "pw"}, "PLAIN takes"),
    ("KAFKA", {**SASL, "SASL_MECHANISM": "GSSAPI"}, "SASL_MECHANISM is not valid.*SCRAM-SHA-512"),
    *(("KAFKA", {**OAUTH, **given}, "OAUTHBEARER takes either") for given in (
        {}, {"SASL_OAUTH_TOKEN_URL": "http://x"},
        {"SASL_OAUTH_TOKEN_FILE": "/t", "SASL_OAUTH_CLIENT_SECRET": "pw"},
    )),
    ("KAFKA", {"SSL_CAFILE": "/etc/ca.pem"}, "needs a HVD_KAFKA_SECURITY_PROTOCOL"),
    *(("KAFKA", {"SECURITY_PROTOCOL": "SSL", f"SSL_{name}": "/none"}, told) for name, told in (
        ("CAFILE", "CAFILE /none is not a file of cert"),
        ("KEYFILE", "needs HVD_KAFKA_SSL_CERTFILE"), ("CERTFILE", "SSL_PASSWORD its password"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("of", "given", "told"), REFUSED, ids=str)
def test_what_is_refused_is_told_in_a_sentence(
    of: str, given: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"HVD_{of}_{name}", value)
    kinds = {"KAFKA": KafkaSettings, "LEARNER": LearnerSettings}
    with pytest.raises(SettingsError, match=told) as refusal:
        kinds.get(of, WorkerSettings).load()
    assert "'pw'" not in str(refusal.value)


@pytest.mark.parametrize("servers", ["a:1", "a.b:9092, c:65535", "[::1]:9092"])
def test_addresses_are_taken(servers: str) -> None:
    KafkaSettings(bootstrap_servers=servers)


def test_a_renamed_setting_works_under_its_old_name_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HVD_WORKER_SIDES", "suffix, plain")
    assert WorkerSettings.load().variants == ("suffix", "plain")
    assert "HVD_WORKER_SIDES is now called HVD_WORKER_VARIANTS" in caplog.text
    monkeypatch.setenv("HVD_WORKER_VARIANTS", "model")
    assert WorkerSettings.load().variants == ("model",)
