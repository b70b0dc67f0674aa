"""The page on settings, made of the classes that read them.

``python -m tests.docs.reference`` writes it anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from decoder.contracts.settings import SECRETS_VARIABLE, KafkaSettings, Settings
from decoder.settings import FACTOR, WHOLE_FACTOR, WorkerSettings
from decoder.telemetry.mapped import FOLDER_VARIABLE
from learner.settings import LearnerSettings
from pipelines.cli import up
from pipelines.machine import FLAGS_VARIABLE

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
CLASSES: Final[dict[str, type[Settings]]] = {
    "Worker": WorkerSettings,
    "Learner": LearnerSettings,
    "Kafka: worker, learner, and every command that reads topics": KafkaSettings,
}
PORTS: Final = {
    "api_port": "the worker's API and its `/metrics`",
    "kafka_port": "the embedded broker",
    "mlflow_port": "MLflow",
    "page_port": "the page that shows live what the service brings",
}
OTHERS: Final = {
    SECRETS_VARIABLE: "folder with a file for each setting that is not to stand in the "
    "environment, named like its variable in lower case",
    FLAGS_VARIABLE: "feature flags to go by instead of the processor's own",
    FOLDER_VARIABLE: "folder that vLLM's processes share figures in; `hvd serve` sets it, in a "
    "vLLM of your own name an empty one",
    "XDG_CACHE_HOME": "where the user's cache is, by the XDG specification; `~/.cache`",
}
THAT_HANG: Final = {
    "name": "host and process id",
    "suffix_max_factor": f"`{FACTOR}`, `{WHOLE_FACTOR}` with `HVD_WORKER_START=counting`",
}
"""Defaults that hang on the machine, or on another setting."""
HEAD: Final = """\
# Settings

Every variable that a process of the service reads, made of the code. What has no row here is a
named constant.

An unknown name with one of these prefixes, or a value out of its range, ends the process with one
sentence. *Secret* values are in no message; files may hold them ([others](#others)).

`hvd serve` sets `HVD_WORKER_ENABLED=1`, and `HVD_WORKER_TENANTS=middleware` unless you set it.
`hvd up` tells its processes where broker, registry and the learner's state are.
"""


def page() -> str:
    """The whole page, in Markdown."""
    parts = [HEAD]
    for title, settings in CLASSES.items():
        parts.append(_table(title, "variable | default | takes | meaning", _rows(settings)))
    ports = inspect.signature(up).parameters
    options = [
        (f"`--{name.replace('_', '-')}`", f"`{port.default}`", PORTS[name])
        for name, port in ports.items()
    ]
    parts.append(_table("Ports of `hvd up`", "option | default | of", options))
    others = [(f"`{name}`", meaning) for name, meaning in OTHERS.items()]
    parts.append(_table("Others", "variable | meaning", others))
    return "\n".join(parts)


def _table(title: str, head: str, rows: Iterable[tuple[str, ...]]) -> str:
    rule = "|".join("---" for _ in head.split("|"))
    body = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"## {title}\n\n| {head} |\n|{rule}|\n{body}"


def _rows(settings: type[Settings]) -> list[tuple[str, ...]]:
    prefix = str(settings.model_config.get("env_prefix", ""))
    return [
        (f"`{prefix}{name.upper()}`", _default(name, field), _takes(field), _meaning(field))
        for name, field in settings.model_fields.items()
    ]


def _meaning(field: FieldInfo) -> str:
    told = field.description or ""
    return told if field.repr else f"{told} (secret)"


def _default(name: str, field: FieldInfo) -> str:
    if name in THAT_HANG:
        return THAT_HANG[name]
    value = field.default
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        value = int(value)
    return f"`{','.join(value) if isinstance(value, tuple) else value}`"


def _takes(field: FieldInfo) -> str:
    """What a value may be, where its default does not say it."""
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind != NoneType]
    words = [word for kind in kinds for word in _words(kind)] or _words(field.annotation)
    if words:
        return ", ".join(f"`{word}`" for word in words)
    if field.annotation is bool:
        return "`0`, `1`"
    return _range(field.metadata)


def _words(kind: Any) -> tuple[str, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _range(limits: list[Any]) -> str:
    """``limits`` are pydantic's, which come from a package that it alone depends on."""
    said: dict[str, Callable[[Any], str]] = {
        "Ge": lambda limit: f"at least {limit.ge}",
        "Gt": lambda limit: f"more than {limit.gt:g}",
        "Le": lambda limit: f"at most {limit.le}",
        "Lt": lambda limit: f"less than {limit.lt:g}",
    }
    known = [limit for limit in limits if type(limit).__name__ in said]
    return ", ".join(said[type(limit).__name__](limit) for limit in known)
