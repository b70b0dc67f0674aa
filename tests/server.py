"""A real vLLM server as a child process, and what its metrics page says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pipelines.stack import processes
from pipelines.stack.running import WORKER_SECONDS, responds

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Server:
    """A running server; ``url`` is without a slash at its end."""

    url: str
    child: processes.Child

    def log(self) -> str:
        return self.child.log.read_text(errors="replace")

    def page(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).raise_for_status().text

    def lives(self) -> bool:
        """Whether its engine does; the process may outlast that for a moment."""
        return self.child.is_alive and responds(f"{self.url}/health")

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all series of ``name`` with these labels; 0 where there is none."""
        return metric(self.page(), name, **labels)


def metric(page: str, name: str, **labels: str) -> float:
    """As :meth:`Server.metric`, of a page."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@contextmanager
def serving(
    arguments: Sequence[str], environment: Mapping[str, str], port: int, log: Path
) -> Iterator[Server]:
    """Start a server that will listen on ``port``, wait until it answers, stop it on leaving."""
    url = f"http://127.0.0.1:{port}"
    child = processes.start("server", arguments, log, environment)
    try:
        processes.wait_until(child, lambda: responds(f"{url}/health"), WORKER_SECONDS)
        yield Server(url, child)
    except Exception:
        child.check()  # that it has ended says more than what was then not to be had
        raise
    finally:
        processes.stop([child])
