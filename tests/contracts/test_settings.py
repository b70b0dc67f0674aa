"""A setting with an unknown name or a bad value stops the process with one clear sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoder.contracts.errors import SettingsError
from decoder.contracts.settings import KafkaSettings, Settings
from decoder.settings import WorkerSettings
from learner.settings import LearnerSettings


def test_defaults_are_the_papers_table_7_but_for_longer_drafts() -> None:
    s = WorkerSettings.load()
    assert (s.suffix_max_depth, s.suffix_max_draft) == (64, 64)
    assert WorkerSettings.load(start="counting").suffix_max_factor == 2.0
    assert WorkerSettings.load(start="counting", suffix_max_factor=3).suffix_max_factor == 3.0
    assert (s.suffix_max_factor, s.suffix_max_offset, s.suffix_min_prob) == (4.0, 0.0, 0.1)


def test_unknown_name_suggests_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVER", "x:1")
    with pytest.raises(SettingsError, match="Did you mean HVD_KAFKA_BOOTSTRAP_SERVERS"):
        KafkaSettings.load()


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (WorkerSettings, "HVD_WORKER_EVENTS_PER_S", "inf"),  # JSON has no such number to hand over
        (WorkerSettings, "HVD_WORKER_HOLDOUT", "nan"),
        (WorkerSettings, "HVD_WORKER_SUFFIX_MAX_FACTOR", "1e10"),  # more than the trees can count
        (WorkerSettings, "HVD_WORKER_NAME", "a" * 257),  # more than a record's reader takes
        (WorkerSettings, "HVD_WORKER_NAME", ""),
        (LearnerSettings, "HVD_LEARNER_BUFFER_EVENTS", "1000000000000"),
        (LearnerSettings, "HVD_LEARNER_ROWS_PER_SECOND", "inf"),
    ],
)
def test_what_would_silence_a_process_is_refused(
    kind: type[Settings], name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=name):
        kind.load()


def test_unknown_prefix_is_refused_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_WROKER_ENABLED", "1")
    with pytest.raises(SettingsError, match="HVD_WROKER_ENABLED"):
        WorkerSettings.load()


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
    LearnerSettings.load()
    assert f"{name} is of a Kubernetes service" in caplog.text


def test_an_address_of_kubernetes_under_the_name_of_a_setting_leaves_its_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HVD_LEARNER_PORT", "tcp://10.0.0.1:8080")
    assert LearnerSettings.load().port is None
    assert "HVD_LEARNER_PORT is of a Kubernetes service" in caplog.text
    monkeypatch.setenv("HVD_LEARNER_PORT", "8080")
    assert LearnerSettings.load().port == 8080


@pytest.mark.parametrize(
    ("name", "value"),
    [("HVD_LEARNER_PORTS", "8080"), ("HVD_LEARNER_SERVICE_PORT", "tcp"), ("HVD_LEARNER_PROT", "1")],
)
def test_what_only_looks_like_it_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=f"unknown setting {name}"):
        LearnerSettings.load()


def test_bad_value_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_WORKER_MODEL_DRAFT_TOKENS", "many")
    with pytest.raises(SettingsError, match="HVD_WORKER_MODEL_DRAFT_TOKENS"):
        WorkerSettings.load()


def test_several_brokers_and_no_password_in_the_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", "a:1,b:2")
    monkeypatch.setenv("HVD_KAFKA_SASL_PLAIN_PASSWORD", "secret")
    settings = KafkaSettings.load()
    assert settings.client_options()["bootstrap_servers"] == ["a:1", "b:2"]
    assert "secret" not in repr(settings)


def test_sides_are_named_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkerSettings.load().sides == ("plain",)
    monkeypatch.setenv("HVD_WORKER_SIDES", "suffix, plain,suffix")
    assert WorkerSettings.load().sides == ("suffix", "plain")
    monkeypatch.setenv("HVD_WORKER_SIDES", "")
    assert WorkerSettings.load().sides == ()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("SIDES", "plain,champion", "name some of plain, suffix, model, first"),
        ("HOLDOUT", "0.95", "less than or equal to 0.9"),
        ("START", "cold", "'first' or 'counting'"),
    ],
)
def test_a_trial_that_cannot_be_is_told_in_a_sentence(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"HVD_WORKER_{name}", value)
    with pytest.raises(SettingsError, match=f"HVD_WORKER_{name} is not valid: .*{told}"):
        WorkerSettings.load()


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
    with pytest.raises(SettingsError, match=r"HVD_SECRETS_DIR names .*none, which is no folder"):
        KafkaSettings.load()


SASL = {"security_protocol": "SASL_SSL"}
OAUTH = {**SASL, "sasl_mechanism": "OAUTHBEARER"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (SASL, "SASL_MECHANISM and .* belong together"),
        ({"sasl_mechanism": "PLAIN"}, "belong together"),
        ({**SASL, "sasl_mechanism": "PLAIN", "sasl_plain_password": "pw"}, "PLAIN takes"),
        ({**SASL, "sasl_mechanism": "GSSAPI"}, "SASL_MECHANISM is not valid.*SCRAM-SHA-512"),
        (OAUTH, "OAUTHBEARER takes either"),
        ({**OAUTH, "sasl_oauth_token_url": "http://x"}, "OAUTHBEARER takes either"),
        (
            {**OAUTH, "sasl_oauth_token_file": "/t", "sasl_oauth_client_secret": "pw"},
            "OAUTHBEARER takes either",
        ),
        ({"ssl_cafile": "/etc/ca.pem"}, "of no use without"),
        ({"security_protocol": "SSL", "ssl_cafile": "/none"}, "CAFILE /none is no file of cert"),
        ({"security_protocol": "SSL", "ssl_keyfile": "/none"}, "needs HVD_KAFKA_SSL_CERTFILE"),
        ({"security_protocol": "SSL", "ssl_certfile": "/none"}, "SSL_PASSWORD its password"),
    ],
)
def test_a_broker_that_cannot_be_spoken_to_is_told_in_a_sentence(
    given: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"HVD_KAFKA_{name}".upper(), value)
    with pytest.raises(SettingsError, match=told) as refusal:
        KafkaSettings.load()
    assert "'pw'" not in str(refusal.value)
