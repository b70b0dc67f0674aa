"""What is shipped for containers: linted, valid by its schema, and consistent with the code."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import validate
from sqlalchemy.engine import make_url

from decoder.contracts.settings import KafkaSettings
from decoder.settings import WorkerSettings
from learner.settings import LearnerSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
CONTAINERFILES = sorted((DEPLOY / "containers").glob("*.Containerfile"))
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
KUBERNETES = "1.34"
OVERLAYS = ["cpu", "tensor-parallel", "gpu", "intake"]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

# `make helm` puts both beside the interpreter
PATH = f"{os.environ['PATH']}{os.pathsep}{BIN}"
HELM, KUBECTL = (shutil.which(name, path=PATH) for name in ("helm", "kubectl"))
needs_helm = pytest.mark.skipif(HELM is None, reason="takes helm: make helm")
needs_kubectl = pytest.mark.skipif(
    KUBECTL is None, reason="takes kubectl, for its kustomize: make helm"
)


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@cache
def built(overlay: str) -> list[dict[str, Any]]:
    page = run(str(KUBECTL), "kustomize", DEPLOY / "kubernetes" / "overlays" / overlay)
    return list(yaml.safe_load_all(page))


def charted(*options: str) -> list[dict[str, Any]]:
    """What ``helm template`` makes of the chart."""
    page = run(str(HELM), "template", "hvd", DEPLOY / "chart", "--namespace", "hvd", *options)
    return [document for document in yaml.safe_load_all(page) if document]


def pods(documents: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each object that makes pods, with their template."""
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet"):
            yield document, document["spec"]["template"]


def containers(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All of a pod, those that run before the others first."""
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


@pytest.mark.parametrize("file", CONTAINERFILES, ids=lambda file: file.name)
def test_container_files_pass_their_linter(file: Path) -> None:
    run(BIN / "hadolint", file)


def test_what_images_copy_is_there_and_not_left_out() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    for file in CONTAINERFILES:
        for line in re.findall(r"^COPY (?!--from)(.+)$", file.read_text(), re.MULTILINE):
            for source in line.split()[:-1]:
                assert (ROOT / source).exists(), f"{file.name}: {source}"
                assert source.split("/")[0] in kept or source in kept, f"{file.name}: {source}"


def test_the_registry_asks_for_a_driver_that_its_image_has() -> None:
    script = (DEPLOY / "containers" / "registry.sh").read_text()
    (scheme,) = re.findall(r'MLFLOW_BACKEND_STORE_URI="(.+)://', script)
    driver = make_url(f"{scheme}://host/name").get_driver_name()
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "requirements" / "registry.lock").read_text(), re.M)
    assert f"{driver}-binary" in pinned


def test_the_worker_has_what_vllm_is_linked_against() -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    (linked,) = Path(found.origin).parent.glob("_C.*.so")
    assert b"libnuma.so.1" in linked.read_bytes(), "what it takes has changed: look at the image"
    _, runs = (DEPLOY / "containers" / "worker-cpu.Containerfile").read_text().rsplit("FROM", 1)
    assert "libnuma1" in runs


def test_compose_is_valid_and_its_files_are_there(tmp_path: Path) -> None:
    run(
        sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec",
        DEPLOY / "compose" / "compose.yaml",
    )  # fmt: skip
    for config in COMPOSE["configs"].values():
        assert (DEPLOY / "compose" / config["file"]).is_file()
    script = tmp_path / "secrets.sh"
    shutil.copy(DEPLOY / "compose" / "secrets.sh", script)
    run("sh", script)
    made = {path: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert {p.name for p in made} == {Path(s["file"]).name for s in COMPOSE["secrets"].values()}
    run("sh", script)
    assert made == {path: path.read_text() for path in made}


def test_every_image_is_pinned() -> None:
    images = [service["image"] for service in COMPOSE["services"].values()]
    for file in CONTAINERFILES:
        images += re.findall(r"^FROM (\S+)", file.read_text(), re.MULTILINE)
    assert len(images) > 12
    for image in images:
        name, _, tag = image.partition(":")
        assert re.search(r"\d+\.\d+", tag), image
        if name.startswith("hvd-"):
            assert tag == VERSION


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_are_valid_by_the_schemas_of_the_api(overlay: str) -> None:
    documents = built(overlay)
    kinds = {document["kind"] for document in documents}
    assert {"Deployment", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"} <= kinds
    assert not kinds & {"Job", "Pod", "ReplicaSet"}, "what may not be changed is not applied twice"
    for document in documents:
        validate(document, KUBERNETES, strict=True)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_belongs_together_is_named_alike(overlay: str) -> None:
    documents = built(overlay)
    labels = [template["metadata"]["labels"] for _, template in pods(documents)]
    for document in documents:
        spec = document.get("spec", {})
        match document["kind"]:
            case "Service":
                selector = spec["selector"]
            case "PodDisruptionBudget" | "Deployment" | "StatefulSet":
                selector = spec["selector"]["matchLabels"]
            case "NetworkPolicy" if "matchLabels" in spec["podSelector"]:
                selector = spec["podSelector"]["matchLabels"]
            case "NetworkPolicy":  # without a selector it is for every pod
                for asked in spec["podSelector"].get("matchExpressions", []):
                    assert asked["operator"] == "In"
                    known = {each.get(asked["key"]) for each in labels}
                    assert set(asked["values"]) <= known, document
                continue
            case _:
                continue
        assert selector and any(selector.items() <= each.items() for each in labels), document
    named = {(d["kind"], d["metadata"]["name"]) for d in documents}
    for document, template in pods(documents):
        spec = template["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        claimed = document["spec"].get("volumeClaimTemplates", [])
        known = volumes.keys() | {claim["metadata"]["name"] for claim in claimed}
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in named
        for container in containers(template):
            assert {mount["name"] for mount in container["volumeMounts"]} <= known
        for container in spec["containers"]:
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert container[probe]["httpGet"]["port"] in ports


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_keeps_the_restricted_standard(overlay: str) -> None:
    for _, template in pods(built(overlay)):
        spec = template["spec"]
        assert not spec["enableServiceLinks"] and not spec["automountServiceAccountToken"]
        assert spec["securityContext"]["runAsNonRoot"]
        for container in containers(template):
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert container["resources"]["limits"]["memory"]


def of_pods(overlay: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The environment of each process of the manifests."""
    documents = built(overlay)
    maps = {d["metadata"]["name"]: d.get("data") for d in documents if d["kind"] == "ConfigMap"}
    for _, template in pods(documents):
        for container in containers(template):
            given = {e["name"]: e.get("value", "pod") for e in container.get("env", [])}
            for source in container["envFrom"]:
                given |= maps[source["configMapRef"]["name"]]
            yield container["name"], given


@needs_kubectl
def test_each_part_logs_in_as_itself_with_a_password_of_its_own() -> None:
    users = {name: given["HVD_KAFKA_SASL_PLAIN_USERNAME"] for name, given in of_pods(OVERLAYS[1])}
    assert users == {
        "worker": "hvd-worker", "learner": "hvd-learner", "topics": "hvd-topics",
        "intake": "hvd-intake",
    }  # fmt: skip
    for _, template in pods(built(OVERLAYS[1])):
        held = {
            v["name"]: v["secret"]["secretName"]
            for v in template["spec"]["volumes"]
            if "secret" in v
        }
        for container in containers(template):
            mounted = {m["mountPath"]: held.get(m["name"]) for m in container["volumeMounts"]}
            assert mounted["/run/secrets/hvd"] == users[container["name"]]
    rights = (DEPLOY.parent / "docs" / "deploy.md").read_text()
    for user in users.values():
        assert f"User:{user}" in rights, f"nothing says what {user} may do"


def test_every_container_takes_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ca_file: Path
) -> None:
    names = ("topics", "learner", "worker")
    given = ((name, COMPOSE["services"][name]["environment"]) for name in names)
    take(given, monkeypatch, tmp_path, ca_file)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_takes_its_environment(
    overlay: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ca_file: Path
) -> None:
    take(of_pods(overlay), monkeypatch, tmp_path, ca_file)


def take(
    environments: Iterable[tuple[str, Mapping[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ca_file: Path,
) -> None:
    seen = 0
    for name, given in environments:
        with monkeypatch.context() as patch:
            for variable, value in given.items():
                patch.setenv(variable, value)
            if "HVD_SECRETS_DIR" in given:
                (tmp_path / "hvd_kafka_sasl_plain_password").write_text("secret")
                patch.setenv("HVD_SECRETS_DIR", str(tmp_path))
            if "HVD_KAFKA_SSL_CAFILE" in given:
                patch.setenv("HVD_KAFKA_SSL_CAFILE", str(ca_file))
            for settings in (KafkaSettings, WorkerSettings, LearnerSettings):
                settings.load()
            told = KafkaSettings.load()
        assert told.bootstrap_servers != KafkaSettings().bootstrap_servers, name
        seen += 1
    assert seen >= 3


AS_OVERLAY = {
    "cpu": "",
    "gpu": "overlays/gpu",
    "intake": "components/intake",
    "tensor-parallel": "overlays/gpu,components/sasl-tls,overlays/tensor-parallel",
}


def bare(documents: list[dict[str, Any]]) -> list[str]:
    """Each object without what helm and kustomize put to it: digests and where it goes."""
    found = []
    for document in documents:
        document["metadata"].pop("namespace", None)
        if document["kind"] in ("Deployment", "StatefulSet"):
            document["spec"]["template"]["metadata"].pop("annotations", None)
        if document["kind"] != "Namespace":
            text = json.dumps(document, sort_keys=True)
            found.append(re.sub(r"(hvd-kafka|hvd-topics)-[a-z0-9]{10}\b", r"\1", text))
    return sorted(found)


@needs_helm
@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_makes_what_the_manifests_are(overlay: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    used = [each for each in AS_OVERLAY[overlay].split(",") if each]
    values.write_text(yaml.safe_dump({"use": used}))
    assert bare(charted("--values", str(values))) == bare(built(overlay))


@needs_helm
def test_what_values_change_is_changed_and_monitoring_goes_by_the_names_of_the_alerts() -> None:
    made = charted(
        "--set", "monitoring=true,network=false,worker.replicas=7,images.hvd-worker=mine:1",
        "--set", "worker.env.HVD_WORKER_NAME=fixed,worker.pod.priorityClassName=high",
        "--set", "monitoringLabels.release=stack",
    )  # fmt: skip
    kinds = {document["kind"]: document for document in made}
    assert "NetworkPolicy" not in kinds
    (worker,) = (d["spec"] for d, _ in pods(made) if d["metadata"]["name"] == "hvd-worker")
    container = worker["template"]["spec"]["containers"][0]
    assert (worker["replicas"], container["image"]) == (7, "mine:1")
    assert worker["template"]["spec"]["priorityClassName"] == "high"
    assert [e for e in container["env"] if e["name"] == "HVD_WORKER_NAME"] == [
        {"name": "HVD_WORKER_NAME", "value": "fixed"}
    ]
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    assert kinds["PrometheusRule"]["spec"] == rules
    for kind in ("PodMonitor", "PrometheusRule"):
        assert kinds[kind]["metadata"]["labels"] == {"release": "stack"}
    monitor = kinds["PodMonitor"]["spec"]
    asked = set(re.findall(r'job="([\w-]+)"', json.dumps(rules).replace('\\"', '"')))
    (wanted,) = monitor["selector"]["matchExpressions"]
    labels = [template["metadata"]["labels"] for _, template in pods(made)]
    assert asked <= set(wanted["values"]) == {each[monitor["jobLabel"]] for each in labels}
    ports = {p["name"] for _, t in pods(made) for c in containers(t) for p in c.get("ports", [])}
    assert ports == {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}


def test_all_that_the_chart_reads_lies_in_it() -> None:
    """Also where no helm is: the folders it can be told to use, and each name of its values."""
    values = yaml.safe_load((DEPLOY / "chart" / "values.yaml").read_text())
    assert (DEPLOY / "chart" / "kubernetes").resolve() == DEPLOY / "kubernetes"
    for file in ("topics.toml", "alerts.yml", "kubernetes/base/kustomization.yaml"):
        assert (DEPLOY / "chart" / file).is_file()
    for folder in ",".join(AS_OVERLAY.values()).split(","):
        assert not folder or (DEPLOY / "chart/kubernetes" / folder / "kustomization.yaml").is_file()
    chart = yaml.safe_load((DEPLOY / "chart" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == VERSION
    assert values["images"]["hvd-learner"].endswith(f":{VERSION}")
    base = (DEPLOY / "kubernetes" / "base" / "network.yaml").read_text()
    assert set(re.findall(r"metadata.name: ([\w-]+)}", base)) == values["namespaces"].keys()
