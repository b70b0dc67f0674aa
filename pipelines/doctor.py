"""``hvd doctor``: problems of this machine and environment, each with a fix."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from decoder.contracts.errors import EngineError, HvdError, ProcessError, SettingsError
from decoder.contracts.masking import masked
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, TOPICS, Topic
from decoder.settings import WorkerSettings
from decoder.tenancy.key import VARIABLE, key_of
from learner.proxies import proxy_of
from learner.topics import (
    CLEANUP,
    REQUEST_MS,
    RETENTION,
    SHORT_MS,
    BrokerAway,
    admin_client,
    settings_of,
)
from pipelines import embedded, machine
from pipelines.stack import broker
from pipelines.stack.running import TRACKING_VARIABLE, responds

PINS: Final = {
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "mlflow": "3.17.2",
    "kafka-python": "3.0.12",
    "numpy": "2.3.5",
}
"""Versions in the lock files; a test in ``tests/pipelines`` keeps them equal."""
EXTRAS: Final = {"torch": "worker", "transformers": "worker", "mlflow": "learner"}
"""Extras that install them beside an existing vLLM."""


LARGEST: Final = "max.message.bytes"
LARGEST_BYTES: Final = 1_000_000
"""Slightly less than Kafka's default. Records of events and most policies are smaller."""
IN_SYNC: Final = "min.insync.replicas"


SHARED: Final = {
    "middleware": "requests of one API key draft from each other's output, and those without any",
    "client": "requests draft from each other's output if their clients name one tenant",
    "shared": "all requests draft from each other's output",
}
"""By who assigns requests to tenants."""


@dataclass(frozen=True)
class Check:
    """One finding; ``blocks``: it keeps a worker from serving."""

    name: str
    ok: bool
    found: str
    fix: str = ""
    blocks: bool = True


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def package(name: str, pin: str) -> Check:
    """A package's version against its pin; a local part such as ``+cpu`` is ignored."""
    installed = _installed(name)
    ok = installed is not None and installed.split("+")[0] == pin
    extra = f"[{EXTRAS[name]}]" if name in EXTRAS else ""
    fix = f"make setup (installs {name} {pin}), or pip install 'hybrid-verified-decoding{extra}'"
    needed = EXTRAS.get(name) != "learner"
    return Check(name, ok, installed or "not installed", fix, blocks=installed is None and needed)


def vllm() -> Check:
    """A vLLM version that the plugin supports, with the code that it relies on."""
    from decoder.engines.vllm import contract

    fix = f"make setup, or install vllm {' or '.join(contract.SUPPORTED)}"
    try:
        number, sources = contract.installed()
        contract.check(number, sources)
    except EngineError as error:
        return Check("vllm", False, str(error), fix)
    return Check("vllm", True, number, fix)


def processor() -> Check:
    """The number format that serving uses."""
    if machine.has_accelerator():
        return Check("processor", True, "CUDA device: the model's own dtype is used")
    flags = machine.cpu_flags()
    ok = "avx2" in flags or platform.machine() != "x86_64"
    text = f"{machine.named_flags(', ')}: serving in {machine.serving_dtype(flags)}"
    return Check("processor", ok, text, "a processor with AVX2 is needed by vLLM's CPU build")


def kafka() -> Check:
    """The broker that the environment names, or the embedded one."""
    if broker.VARIABLE not in os.environ:
        installed = _installed("noida-db")
        fix = f"for hvd up and hvd demo: make setup, or set {broker.VARIABLE}"
        text = f"embedded, noida-db {installed or 'missing'}"
        return Check("broker", installed is not None, text, fix, blocks=False)
    try:
        settings = KafkaSettings.load()
    except SettingsError as error:
        return Check("broker", False, str(error), "correct the setting (docs/deploy.md)")
    return _service("broker", settings.bootstrap_servers, broker.answers(settings), broker.VARIABLE)


def _service(name: str, address: str, ok: bool, variable: str) -> Check:
    text = f"{address} {'answers' if ok else 'does not answer'}"
    return Check(name, ok, text, f"start it, correct {variable}, or unset it")


def topics() -> Check:
    """The settings of the topics on the broker that the environment names."""
    if broker.VARIABLE not in os.environ:
        return Check("topics", True, "made with the stack")
    try:
        harms = harmful(KafkaSettings.load())
    except BrokerAway:
        return Check("topics", True, "not checked: the broker does not answer")
    except HvdError as error:
        harms = [str(error)]
    fix = "kafka-configs.sh --alter, or python -m learner.topics deploy/kafka/topics.toml"
    return Check("topics", not harms, "; ".join(harms) or "settings are fine", fix, blocks=False)


def harmful(kafka: KafkaSettings) -> list[str]:
    """A sentence for each of our topics with a harmful setting, or that is missing while others
    exist. Changes nothing.

    Raises:
        BrokerError: the broker is away, or refuses.
    """
    with admin_client(kafka, REQUEST_MS) as admin:
        names = set(admin.list_topics())
        existing = [topic for topic in TOPICS if topic.name in names]
        if not existing:
            return []
        configs = settings_of(admin, existing)
        replicas = {
            each["name"]: min((len(p["replica_nodes"]) for p in each["partitions"]), default=1)
            for each in admin.describe_topics([topic.name for topic in existing])
        }
    sentences = [f"{t.name} is missing: start a learner" for t in TOPICS if t not in existing]
    for topic in existing:
        sentences += _harms(topic, replicas[topic.name], configs.get(topic.name, {}))
    return sentences


def _harms(topic: Topic, replicas: int, config: Mapping[str, str]) -> Iterator[str]:
    name, cleanup = topic.name, config.get(CLEANUP, topic.cleanup)
    if cleanup != topic.cleanup:
        what = "loses serving policies" if topic.compacted else "keeps one record of each worker"
        yield f"{name} has {CLEANUP}={cleanup} and {what}: set {topic.cleanup}"
    retention = int(config.get(RETENTION, "-1"))
    if topic is DRAFTS and 0 <= retention < SHORT_MS:
        yield f"{name} has {RETENTION}={retention}: a learner away for longer loses events"
    largest = int(config.get(LARGEST, LARGEST_BYTES))
    if largest < LARGEST_BYTES:
        yield f"{name} has {LARGEST}={largest} and refuses larger records: set 1048576 at least"
    needed = int(config.get(IN_SYNC, "1"))
    if needed > replicas:
        yield f"{name} has {IN_SYNC}={needed} and {replicas} replicas: it takes no record"


def registry() -> Check:
    """The registry that the environment names, or the one the stack starts."""
    uri = os.environ.get(TRACKING_VARIABLE)
    if not uri:
        fix = f"for hvd up, a learner and hvd policy: make setup, or set {TRACKING_VARIABLE}"
        ok = _installed("mlflow") is not None
        return Check("registry", ok, "started with the stack", fix, blocks=False)
    if not uri.startswith("http"):
        return Check("registry", True, masked(uri))
    ok, proxy = responds(f"{uri.rstrip('/')}/health"), proxy_of(uri)
    address = masked(f"{uri}, asked by the proxy {proxy}," if proxy else uri)
    return _service("registry", address, ok, TRACKING_VARIABLE)


def model() -> Check:
    """The embedded model, expanded."""
    try:
        home = embedded.model_directory()
    except SettingsError as error:
        return Check("model", False, "nowhere to keep it", str(error), blocks=False)
    if embedded.is_expanded(home):
        return Check("model", True, str(home))
    above = next(folder for folder in home.parents if os.access(folder, os.F_OK))
    if os.access(above / ".", os.W_OK):
        fix = "for the embedded one: hvd model"
        return Check("model", False, "not expanded yet", fix, blocks=False)
    fix = "for the embedded one: set XDG_CACHE_HOME to a folder that this user may write"
    return Check("model", False, f"{above} cannot be written", fix, blocks=False)


def tenants() -> Check:
    """Which requests may draft from each other's text under ``hvd serve``."""
    try:
        settings = WorkerSettings.load()
        key = key_of(settings)
    except SettingsError as error:
        return Check("tenants", False, str(error), "correct the setting (docs/security.md)")
    source = os.environ.get("HVD_WORKER_TENANTS", "middleware")
    text = f"{SHARED[source]}; names are hashed under "
    text += "the operator's key" if key else f"a new key at each start (set {VARIABLE})"
    fix = "unset HVD_WORKER_TENANTS, unless all clients may see each other's text"
    return Check("tenants", source == "middleware", text, fix, blocks=False)


def shared_memory() -> Check:
    """Space for an engine's lock, without which none starts, and for several ranks."""
    for ranks in (1, 2):
        try:
            machine.check_shared_room(ranks)
        except ProcessError as error:
            room = f"{machine.shared_room() >> 20} MiB"
            return Check("shared memory", False, room, str(error), blocks=ranks == 1)
    return Check("shared memory", True, "room for an engine of two ranks")


def examine() -> list[Check]:
    """All checks, in the order in which to fix them."""
    packages = [package(name, pin) for name, pin in PINS.items()]
    others = vllm, processor, shared_memory, kafka, topics, registry, model, tenants
    return [*packages, *(check() for check in others)]
