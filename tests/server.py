"""A real vLLM server as a child process, and what its metrics page says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from decoder.contracts.errors import ProcessError
from pipelines.stack import processes
from pipelines.stack.running import WORKER_SECONDS, responds

PATIENCE_S = 600.0
IDLE_S = 3600
"""How long an idle connection stays open. With vLLM's five seconds one may be closed while the next
request is on its way, where a machine stands still for so long; and clients here never ask again.
"""
LAST_LINES = 60


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
    """Start a server that will listen on ``port``, wait until it answers, stop it on leaving.

    Raises:
        ProcessError: it ended or closed a connection inside the ``with`` block; with the end of its
            log.
    """
    url = f"http://127.0.0.1:{port}"
    lasting = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(IDLE_S)} | environment
    child = processes.start(processes.Part("server", arguments, log, environment=lasting))
    try:
        processes.wait_until(child, lambda: responds(f"{url}/health"), WORKER_SECONDS)
        yield Server(url, child)
    except (httpx.TransportError, openai.APIConnectionError) as error:
        with suppress(ProcessError):  # its engine ends, and with it connections, before it does
            processes.wait_until(child, lambda: False, 10.0)
        told = f"{error!r}; the server {child.ending() or 'runs'}. The end of its log:"
        raise ProcessError(f"{told}\n{child.tail(LAST_LINES)}") from None
    except Exception:
        child.check()  # that it has ended says more than what was then not to be had
        raise
    finally:
        processes.stop([child])
