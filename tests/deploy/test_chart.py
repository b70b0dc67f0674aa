"""Whatever stands in its values, the chart makes sound objects or says which value is not one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import validate

from decoder.contracts.errors import SettingsError
from decoder.contracts.settings import KafkaSettings, Settings
from decoder.settings import WorkerSettings
from learner.settings import LearnerSettings
from tests.deploy.test_manifests import (
    AS_OVERLAY,
    DEPLOY,
    HELM,
    KUBERNETES,
    OVERLAYS,
    containers,
    needs_helm,
    pods,
    take,
)

PARTS = {"kafka": KafkaSettings, "worker": WorkerSettings, "learner": LearnerSettings}
TEXTS = {
    "1048576": "1048576", "2147483648": "2147483648", "9007199254740991": "9007199254740991",
    "-1048576": "-1048576", "1e3": "1000", "0.1": "0.1", "2.5e6": "2500000", "007": "7",
    "true": "true", "yes": "true", "no": "false",
    '"1048576"': "1048576", '"1e3"': "1e3", '"007"': "007", '"yes"': "yes", '"null"': "null",
    '"12:30"': "12:30", '"2001-01-01"': "2001-01-01", '""': "", '" edges "': " edges ",
    '"two\\n---\\nlines\\n"': "two\n---\nlines\n", "'a \"b\" c'": 'a "b" c',
    '"{{ .Values }}"': "{{ .Values }}",
    "'it''s: #1'": "it's: #1", "plain": "plain",
    "[plain, suffix]": "plain,suffix", "[1048576, 0.5, yes]": "1048576,0.5,true", "[]": "",
}  # fmt: skip
"""What a variable gets of what stands in a file of values. ``007`` and ``yes`` are YAML's own."""
REFUSED = ("{a: 1}", "[[1]]", "[{a: 1}]", "[null]", "12345678901234567890", "-1e300")
NUMBERS = ("1048576", "2147483648", "9007199254740991", "-1048576", "1e3", "0.1", "2.5e6")


def template(*options: str, values: str = "") -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    command = [HELM, "template", "hvd", str(DEPLOY / "chart"), "--namespace", "hvd"]
    return subprocess.run(
        [*command, "--values", "-", *options],
        input=values, capture_output=True, text=True, check=False,
    )  # fmt: skip


def made(values: str) -> list[dict[str, Any]]:
    done = template(values=values)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document]


def variables(documents: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """By container: what it gets of the ConfigMap, and the values that stand at it."""
    maps = {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "ConfigMap"}
    found = {"kafka": maps["hvd-kafka"]}
    for _, pod in pods(documents):
        main = pod["spec"]["containers"][0]
        found[main["name"]] = {e["name"]: e["value"] for e in main["env"] if "value" in e}
    return found


def every_setting() -> Iterator[tuple[str, str, type[Settings]]]:
    """The part of the values, the variable and the class of each setting."""
    for part, settings in PARTS.items():
        for field in settings.model_fields:
            name = f"{settings.model_config['env_prefix']}{field}".upper()
            yield part, name, settings
            if settings is LearnerSettings:
                yield "intake", name, settings


def everywhere(value: str) -> str:
    """Values in which each setting of each process is ``value``."""
    lines = dict[str, list[str]]()
    for part, name, _ in every_setting():
        lines.setdefault(part, []).append(f"    {name}: {value}\n")
    parts = [f"{part}:\n  env:\n{''.join(lines[part])}" for part in ("worker", "learner", "intake")]
    return "".join([f"kafka:\n{''.join(lines['kafka'])}", *parts])


@needs_helm
@pytest.mark.parametrize("value", TEXTS)
def test_each_setting_gets_the_text_that_its_value_stands_for(value: str) -> None:
    documents = made(everywhere(value))
    for document in documents:
        sound(document)
    found = variables(documents)
    names = {(part, name) for part, name, _ in every_setting()}
    assert {(part, name): found[part][name] for part, name in names} == dict.fromkeys(
        names, TEXTS[value]
    )


@needs_helm
@pytest.mark.parametrize("value", NUMBERS)
def test_each_setting_takes_a_number_of_the_chart_as_it_takes_the_number(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = variables(made(everywhere(value)))
    number = yaml.safe_load(value) if "e" not in value else int(float(value))
    taken = 0
    for part, name, settings in every_setting():
        field = name.removeprefix(str(settings.model_config["env_prefix"])).lower()
        if settings.model_fields[field].annotation not in (int, float):
            continue
        with monkeypatch.context() as patch:
            patch.setenv(name, found[part][name])
            try:
                given: object = getattr(settings.load(), field)
            except SettingsError as error:
                given = None
                assert name in str(error) and "\n" not in str(error)
        try:
            wanted = getattr(settings(**{field: number}), field)
        except ValueError:
            wanted = None
        assert given == wanted, name
        taken += given is not None
    assert taken or float(number) < 0


@needs_helm
def test_a_null_takes_a_variable_away() -> None:
    before, after = variables(made("")), variables(made(everywhere("null")))
    for part, name, _ in every_setting():
        assert name not in after[part], f"{part} has {name}: {after[part][name]}"
    assert "HVD_LEARNER_MLFLOW_TRACKING_URI" in before["learner"]
    assert before["worker"].keys() - after["worker"].keys() == set(), "HVD_WORKER_NAME is the pod's"
    for _, pod in pods(made("worker: {env: {HVD_WORKER_NAME: null}}")):
        for container in containers(pod):
            assert "HVD_WORKER_NAME" not in [each["name"] for each in container["env"]]


@needs_helm
@pytest.mark.parametrize("value", REFUSED)
@pytest.mark.parametrize("name", ["HVD_WORKER_QUEUE_SIZE", "HVD_KAFKA_SASL_PLAIN_USERNAME"])
def test_what_is_no_text_is_refused_by_its_name(name: str, value: str) -> None:
    part = "kafka: {%s: %s}" if "KAFKA" in name else "worker: {env: {%s: %s}}"
    done = template(values=part % (name, value))
    assert done.returncode != 0 and name in done.stderr


@needs_helm
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_process_takes_the_charts_environment(
    overlay: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ca_file: Path
) -> None:
    documents = made(f"use: [{AS_OVERLAY[overlay]}]")
    maps = variables(documents)["kafka"]
    given = (
        (c["name"], maps | {e["name"]: e.get("value", "pod") for e in c["env"]})
        for _, pod in pods(documents)
        for c in containers(pod)
    )
    take(given, monkeypatch, tmp_path, ca_file)


@cache
def _valid(document: str) -> None:
    validate(json.loads(document), KUBERNETES, strict=True)


def sound(document: dict[str, Any]) -> None:
    """As the API takes it; its schemas know no kinds of the Prometheus Operator."""
    for value in document["metadata"].get("labels", {}).values():
        assert isinstance(value, str), document["metadata"]
    if document["apiVersion"].startswith("monitoring.coreos.com/"):
        return
    _valid(json.dumps(document, sort_keys=True))
    text = yaml.safe_dump(document)
    assert "<nil>" not in text and "map[" not in text and "%!" not in text


def paths(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where a value may stand."""
    for key, value in values.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


VALUES = yaml.safe_load((DEPLOY / "chart" / "values.yaml").read_text())
PATHS = [*paths(VALUES), ("images", "hvd-worker"), ("monitoringLabels", "release")]
FEW = ("null", "1048576", "-1", "0.5", "yes", '""', '"007"', "[plain, 1]", "{a: 1}")
MORE = ("3000000000", "1e3", "{a: null}", "{}", *TEXTS, *REFUSED)
GIVEN_ON = ("pod", "resources", "volumes", "mounts", "egress")
"""Whose members are Kubernetes' own, whose API refuses what it does not know."""


def default(path: tuple[str, ...]) -> str:
    """As JSON."""
    value: Any = VALUES
    for key in path:
        value = value.get(key)
    return json.dumps(value)


def check(path: tuple[str, ...], values: tuple[str, ...]) -> None:
    """Each value at ``path`` makes sound objects, or is refused by its name."""
    monitoring = () if path == ("monitoring",) else ("--set", "monitoring=true")
    for value in values:
        if path[-1] in GIVEN_ON and "a:" in value:
            continue
        text = value
        for key in reversed(path):
            text = f"{{{json.dumps(key)}: {text}}}"
        done = template(*monitoring, values=text)
        assert done.returncode == 0 or value != default(path), done.stderr
        if done.returncode:
            assert path[-1] in done.stderr, f"{text}: {done.stderr}"
            for crash in ("nil pointer", "wrong type", "runtime error", "panic", "parse error"):
                assert crash not in done.stderr, f"{text}: {done.stderr}"
            continue
        for document in yaml.load_all(done.stdout, yaml.CSafeLoader):
            if document:
                sound(document)


@needs_helm
@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_each_value_of_the_chart_makes_sound_objects_or_is_named(path: tuple[str, ...]) -> None:
    check(path, (default(path), *FEW))


@needs_helm
@pytest.mark.long
@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_each_value_of_the_chart_and_each_odd_text(path: tuple[str, ...]) -> None:
    check(path, MORE)


@needs_helm
def test_namespaces_may_take_each_others_names() -> None:
    given = {"kafka": "monitoring", "monitoring": "kafka", "mlflow": "2024", "gateway": "yes"}
    kube = VALUES["namespaces"]["kube-system"]
    (before, after) = (
        json.dumps([d for d in made(values) if d["kind"] == "NetworkPolicy"], sort_keys=True)
        for values in ("", yaml.safe_dump({"namespaces": given}))
    )
    label = '"kubernetes.io/metadata.name": "%s"'
    for name in (*given, kube):
        before = before.replace(label % name, label % f"was {name}")
    for name in (*given, kube):
        before = before.replace(label % f"was {name}", label % given.get(name, name))
    assert after == before


def named(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name))
    return found


@needs_helm
def test_what_an_autoscaler_sets_is_left_out() -> None:
    documents = made("{worker: {autoscaled: true, replicas: 5}, intake: {autoscaled: true}}")
    for kind, name, has in (
        ("Deployment", "hvd-worker", False), ("Deployment", "hvd-intake", False),
        ("StatefulSet", "hvd-learner", True),
    ):  # fmt: skip
        assert ("replicas" in named(documents, kind, name)["spec"]) == has


@needs_helm
def test_a_learners_volume_has_the_class_and_the_size_that_are_named() -> None:
    specs = [
        named(made(values), "StatefulSet", "hvd-learner")["spec"]["volumeClaimTemplates"][0]["spec"]
        for values in ("", "state: {class: fast-ssd, size: 50Gi}")
    ]
    assert [(s.get("storageClassName"), s["resources"]["requests"]["storage"]) for s in specs] == [
        (None, "10Gi"), ("fast-ssd", "50Gi"),
    ]  # fmt: skip


@needs_helm
def test_volumes_are_added_to_those_of_the_manifests() -> None:
    values = yaml.safe_dump({
        part: {
            "volumes": [{"name": "more", "emptyDir": {}}],
            "mounts": [{"name": "more", "mountPath": "/more"}],
        }
        for part in ("worker", "learner", "intake")
    })  # fmt: skip
    before, after = (dict(pods_by_name(made(given))) for given in ("", values))
    assert before.keys() == {"hvd-worker", "hvd-learner", "hvd-intake"}
    for name, spec in after.items():
        was, main = before[name]["containers"][0], spec["containers"][0]
        more = {"name": "more", "mountPath": "/more"}
        assert spec["volumes"] == [*before[name]["volumes"], {"name": "more", "emptyDir": {}}]
        assert main["volumeMounts"] == [*was["volumeMounts"], more]


def pods_by_name(documents: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for document, pod in pods(documents):
        sound(document)
        yield document["metadata"]["name"], pod["spec"]


@needs_helm
@pytest.mark.parametrize(
    "values", ["use: [components/oauth]", "egress: [{ports: [{protocol: TCP, port: 443}]}]"]
)
def test_every_process_can_reach_an_issuer_of_tokens(values: str) -> None:
    policy = named(made(values), "NetworkPolicy", "kafka")
    sound(policy)
    before = named(made(""), "NetworkPolicy", "kafka")["spec"]
    rule = {"ports": [{"protocol": "TCP", "port": 443}]}
    assert policy["spec"] == before | {"egress": [*before["egress"], rule]}
    (who,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert who["values"] == ["hvd-worker", "hvd-learner", "hvd-intake"]


@needs_helm
def test_every_process_takes_the_environment_of_a_broker_with_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ca_file: Path
) -> None:
    documents = made("use: [components/oauth]")
    maps = variables(documents)["kafka"]
    for part in ("id", "secret"):
        monkeypatch.setenv(f"HVD_KAFKA_SASL_OAUTH_CLIENT_{part.upper()}", "of the Secret")
    given = (
        (c["name"], maps | {e["name"]: e.get("value", "pod") for e in c["env"]})
        for _, pod in pods(documents)
        for c in containers(pod)
    )
    take(given, monkeypatch, tmp_path, ca_file)


@needs_helm
def test_no_disruption_budget_keeps_a_single_pod_from_being_moved() -> None:
    budgets = [d["spec"] for d in made("") if d["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == 2
    for spec in budgets:
        assert spec["maxUnavailable"] == 1 and "minAvailable" not in spec


@needs_helm
def test_an_unknown_value_is_refused() -> None:
    for values in ("workers: {replicas: 3}", "worker: {replica: 3}", "namespaces: {kafak: x}"):
        done = template(values=values)
        assert done.returncode != 0 and values.split("{")[0].split(":")[0] in done.stderr


def test_the_schema_of_values_is_one_and_its_defaults_keep_it() -> None:
    import jsonschema

    schema = json.loads((DEPLOY / "chart" / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.Draft7Validator(schema).validate(VALUES)
    assert schema["properties"].keys() == VALUES.keys() | {"global"}
    for part in ("worker", "learner", "intake"):
        assert schema["definitions"]["part"]["properties"].keys() == VALUES[part].keys()
