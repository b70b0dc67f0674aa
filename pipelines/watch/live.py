"""The live page of a running service. It begins with four sentences: gain, serving policy,
learning, and problems."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Final

from decoder.contracts.bundle import ANY_SCOPE
from decoder.contracts.masking import without_login
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.limited_log import LimitedLog
from decoder.policy.first import first_or_counting
from learner.evaluation.effect import FEWEST
from learner.page import make_handler
from pipelines import machine
from pipelines.watch.ledger import LEARNED, Ledger, Observer
from pipelines.watch.page import (
    ALL,
    NAMES,
    Record,
    as_text,
    compared,
    is_bounded,
    record,
    render,
    uplifts,
)

TITLE: Final = "Adaptive decoding, live"
HISTORY_S: Final = 3600.0
FRESH_S: Final = 4.0  # figures are computed at most this often, since they take a part of a core
HOSTS: Final = ("127.0.0.1", "localhost")
"""Accepted host names. Another name may be a foreign page's that resolves to this machine (DNS
rebinding)."""


LOG_BYTES: Final = 1 << 16  # bytes shown of a log's end


def links_to(api: str, tracking_uri: str, parts: Iterable[str]) -> dict[str, str]:
    """Links by name: the worker's metrics, MLflow if it is a server, and the parts' logs on this
    page."""
    links = {"metrics": f"{api}/metrics"} | {f"the {part}'s log": f"/log/{part}" for part in parts}
    if tracking_uri.startswith("http"):
        registry = without_login(tracking_uri)
        links |= {f"{page} in MLflow": f"{registry}/#/{page}" for page in ("models", "experiments")}
    return links


STILL_TO_COME: Final = "Nothing yet: comparisons need minutes of requests (HVD_WORKER_HOLDOUT)."


@contextmanager
def serving(
    kafka: KafkaSettings, port: int, links: Mapping[str, str] = {},
    logs: Mapping[str, Path] = {}, request: str = "",
) -> Iterator[str]:  # fmt: skip
    """Serve the page on 127.0.0.1, at ``port`` or a free one; yields its address.

    It shows the last hour and updates. Neither a missing broker nor an unreadable record ends it.
    Requests for other host names are refused.

    Args:
        logs: by part; their ends are served.
        request: the command of a first request, as a hint.

    Raises:
        ProcessError: the port is taken.
    """
    ledger = Ledger(keep_s=HISTORY_S)
    page = _Page(ledger, links, logs, request)
    machine.check_free(port, "choose another with --page-port")
    served = ThreadingHTTPServer((HOSTS[0], port), make_handler(page.respond))
    with served as server, Observer(kafka, ledger, HISTORY_S):
        threading.Thread(target=server.serve_forever, name="page", daemon=True).start()
        try:
            yield f"http://{HOSTS[0]}:{server.server_port}"
        finally:
            server.shutdown()


class _Page:
    """Answers requests for the page, its figures and the logs."""

    def __init__(
        self, ledger: Ledger, links: Mapping[str, str], logs: Mapping[str, Path], request: str
    ) -> None:
        nothing = f"Nothing yet: it takes requests, such as this.\n\n{request}".rstrip()

        @lru_cache(1)
        def figures(period: float) -> Record:
            empty = STILL_TO_COME if ledger.seen else nothing
            return record(ledger, TITLE, sentences(ledger, links), nothing=empty)

        self._logs, self._figures, self._lock = logs, figures, threading.Lock()
        self._log = LimitedLog()  # browsers ask every few seconds

    def respond(self, host: str, path: str) -> tuple[int, str, str]:
        """Status, content type and body."""
        if host.partition(":")[0] not in HOSTS:
            return 403, "text/plain", "Ask for http://127.0.0.1 and the port."
        try:
            return self._answer(path)
        except Exception:  # noqa: BLE001 -- the next figures may be fine
            self._log.exception("the page's figures cannot be computed")
            return 503, "text/plain", "That cannot be shown now: try again."

    def _answer(self, path: str) -> tuple[int, str, str]:
        if log := self._logs.get(path.removeprefix("/log/")):
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - LOG_BYTES))
                return 200, "text/plain; charset=utf-8", file.read().decode(errors="replace")
        if path not in ("/", "/figures.json"):
            return 404, "text/plain", "There is /, /figures.json and /log/ with a part's name."
        with self._lock:
            now = self._figures(time.monotonic() // FRESH_S)
        if path == "/":
            return 200, "text/html; charset=utf-8", render(now, live=True)
        return 200, "application/json", json.dumps(now, allow_nan=False)


SILENT_S: Final = 15.0  # statuses arrive every second; after this silence the sender is gone
CLOSE: Final = 0.05  # half the width, as a share, at which an interval is narrow enough


def sentences(ledger: Ledger, links: Mapping[str, str]) -> list[dict[str, str]]:
    """The four sentences about the worker seen last and its learner: ``text``, and ``label`` and
    ``href`` of a link."""
    worker = ledger.statuses[-1] if ledger.statuses else None
    learner = ledger.learner[-1] if ledger.learner else None
    problems = list(_troubles(ledger, worker, learner))
    wrong = "Nothing is wrong."
    if problems:
        wrong = f"Wrong now: {'; '.join(what for _, what in problems)}."
    texts = [
        (_gain(ledger), "metrics"),
        (_serving(ledger, worker), "models in MLflow"),
        (_learned(learner), "experiments in MLflow"),
        (wrong, f"the {problems[0][0] if problems else 'worker'}'s log"),
    ]
    linked = [(text, of if of in links else "the learner's log") for text, of in texts]
    return [
        {"text": text} | ({"label": of, "href": links[of]} if of in links else {})
        for text, of in linked
    ]


def _gain(ledger: Ledger) -> str:
    rounds = ledger.own_rounds
    side = compared(rounds)[0]
    one = uplifts(rounds, ())[ALL][side]
    if not one.pairs:
        return f"The gain over {NAMES[side]} is not known yet: no comparison has ended."
    spent = (rounds[-1].time - rounds[0].time) / 60.0
    if not is_bounded(one):
        more = spent / max(one.pairs - 1, 1) * (FEWEST - one.pairs)
        return f"The gain is not known yet: it takes about {_minutes(more)} more of such traffic."
    text = f"It makes {as_text(one)} times the tokens a second of {NAMES[side]}"
    if not one.low <= 1.0 <= one.high:
        return f"{text}."
    # an interval shrinks with the root of the time
    half = math.log(one.high / one.low) / 2.0
    more = spent * ((half / max(abs(math.log(one.ratio)), CLOSE)) ** 2 - 1.0)
    return f"{text}; whether it is faster takes about {_minutes(more)} more to tell."


def _minutes(many: float) -> str:
    return f"{max(1, math.ceil(many))} minute{'s' if many > 1.0 else ''}"


def _serving(ledger: Ledger, worker: WorkerStatus | None) -> str:
    if worker is None:
        return "No worker has reported yet."
    since = ""
    if worker.policy_applied_at:
        since = f" since {datetime.fromtimestamp(worker.policy_applied_at):%H:%M:%S}"
    policies = [p.policy for p in ledger.published if p.policy]
    card = next((p.provenance for p in policies if p.version == worker.policy_version), {})
    named = f"Policy version {worker.policy_version}"
    if not worker.policy_version:
        named = f"Policy {ledger.named(0)},"
    elif card.get("origin") == LEARNED:
        named += ", trained by the learner,"
    elif card and card == first_or_counting(ANY_SCOPE).provenance:
        named += ", the policy that ships,"
    if worker.fallback:
        by = f"the fallback '{worker.fallback}' decides: it is faster now."
        return f"{named} is loaded{since}, but {by}"
    return f"{named} decides{since}."


def _learned(learner: LearnerStatus | None) -> str:
    if learner is None:
        return "No learner has reported yet."
    text = (
        f"The learner read {learner.events_consumed} events, tested {learner.candidates} "
        f"candidates and promoted {learner.promotions}"
    )
    return f"{text}; {learner.rollout_said}." if learner.rollout_said else f"{text}."


def _troubles(
    ledger: Ledger, worker: WorkerStatus | None, learner: LearnerStatus | None
) -> Iterator[tuple[str, str]]:
    """Problems, each with the part whose log explains it."""
    now = time.time()
    for name, last in (("worker", worker), ("learner", learner)):
        if last is None or now - last.time > SILENT_S:
            quiet = "" if last is None else f" for {now - last.time:.0f} seconds"
            yield name, f"the {name} has not reported{quiet}"
    if worker is not None:
        if worker.faults:
            yield "worker", f"{worker.faults} faults of the worker, which then decoded plainly"
        reasons = {**worker.drops, **worker.events_refused, "left at its end": worker.events_failed}
        if counts := _counted(reasons):
            yield "worker", f"events of the worker are lost ({counts})"
    if learner is not None:
        if learner.registry_away_since:
            yield "registry", "the registry does not answer, so nothing is registered or promoted"
        if learner.faults:
            yield "learner", f"{learner.faults} records could not be learned from"
        if counts := _counted(learner.given_up):
            yield "learner", f"registrations and moves were given up ({counts})"
    if ledger.refused:
        yield "worker", f"{ledger.refused} records could not be read"


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in reasons.items() if count)
