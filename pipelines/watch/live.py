"""The page of a running service, served as it changes: first what it comes to, in four sentences.

These are its worth, what is in force and why, what was learned, what is wrong.
"""

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
from learner.page import handler
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
FRESH_S: Final = 4.0
"""Figures are computed anew no more often: however many look on, it costs a part of a core."""
HOSTS: Final = ("127.0.0.1", "localhost")
"""Names it is asked by. A page of a stranger whose name leads here asks by another."""


LOG_BYTES: Final = 1 << 16
"""Of a log's end, which is what is shown of it."""


def links_to(api: str, tracking_uri: str, parts: Iterable[str]) -> dict[str, str]:
    """Addresses of what tells more, by what it is: the worker's metrics, MLflow where that is a
    server, and the parts' logs, which the page serves itself."""
    found = {"metrics": f"{api}/metrics"} | {f"the {part}'s log": f"/log/{part}" for part in parts}
    if tracking_uri.startswith("http"):
        registry = without_login(tracking_uri)
        found |= {f"{page} in MLflow": f"{registry}/#/{page}" for page in ("models", "experiments")}
    return found


STILL_TO_COME: Final = "Nothing yet: comparisons take minutes of requests (HVD_WORKER_HOLDOUT)."


@contextmanager
def serving(
    kafka: KafkaSettings, port: int, links: Mapping[str, str] = {},
    logs: Mapping[str, Path] = {}, request: str = "",
) -> Iterator[str]:  # fmt: skip
    """Serve the page on 127.0.0.1, at ``port`` or a free one; its address. It shows the last hour,
    and what comes; ``logs`` by their part, whose ends it serves, and the command of a first
    ``request``.

    Neither a broker that is away nor a record that keeps no contract ends it. Whoever asks by
    another name than that of this machine is refused.

    Raises:
        ProcessError: the port is taken.
    """
    ledger = Ledger(keep_s=HISTORY_S)
    nothing = f"Nothing yet: it takes requests, such as this.\n\n{request}".rstrip()
    limited_log = LimitedLog()  # browsers ask every few seconds
    one_at_a_time = threading.Lock()

    @lru_cache(1)
    def figures(period: float) -> Record:
        empty = STILL_TO_COME if ledger.seen else nothing
        return record(ledger, TITLE, sentences(ledger, links), nothing=empty)

    def answer(path: str) -> tuple[int, str, str]:
        if log := logs.get(path.removeprefix("/log/")):
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - LOG_BYTES))
                return 200, "text/plain; charset=utf-8", file.read().decode(errors="replace")
        if path not in ("/", "/figures.json"):
            return 404, "text/plain", "There is /, /figures.json and /log/ with a part's name."
        with one_at_a_time:
            now = figures(time.monotonic() // FRESH_S)
        if path == "/":
            return 200, "text/html; charset=utf-8", render(now, live=True)
        return 200, "application/json", json.dumps(now, allow_nan=False)

    def respond(host: str, path: str) -> tuple[int, str, str]:
        if host.partition(":")[0] not in HOSTS:
            return 403, "text/plain", "Ask for http://127.0.0.1 and the port."
        try:
            return answer(path)
        except Exception:  # noqa: BLE001 -- the next figures may be well again
            limited_log.exception("the page's figures cannot be computed")
            return 503, "text/plain", "That cannot be shown now: try again."

    machine.check_free(port, "choose another with --page-port")
    served = ThreadingHTTPServer((HOSTS[0], port), handler(respond))
    with served as server, Observer(kafka, ledger, HISTORY_S):
        threading.Thread(target=server.serve_forever, name="page", daemon=True).start()
        try:
            yield f"http://{HOSTS[0]}:{server.server_port}"
        finally:
            server.shutdown()


SILENT_S: Final = 15.0
"""A status comes each second: whoever sends none for so long is away, or has ended."""
CLOSE: Final = 0.05
"""Half the width, as a share, at which an interval is narrow enough to stop waiting for."""


def sentences(ledger: Ledger, links: Mapping[str, str]) -> list[dict[str, str]]:
    """The four, of the worker seen last and its learner: ``text``, and of the one link that tells
    more its ``label`` and ``href``."""
    worker = ledger.statuses[-1] if ledger.statuses else None
    learner = ledger.learner[-1] if ledger.learner else None
    found = list(_troubles(ledger, worker, learner))
    wrong = f"Wrong now: {'; '.join(what for _, what in found)}." if found else "Nothing is wrong."
    told = [
        (_worth(ledger), "metrics"),
        (_in_force(ledger, worker), "models in MLflow"),
        (_learned(learner), "experiments in MLflow"),
        (wrong, f"the {found[0][0] if found else 'worker'}'s log"),
    ]
    known = [(text, of if of in links else "the learner's log") for text, of in told]
    return [
        {"text": text} | ({"label": of, "href": links[of]} if of in links else {})
        for text, of in known
    ]


def _worth(ledger: Ledger) -> str:
    rounds = ledger.own_rounds
    side = compared(rounds)[0]
    one = uplifts(rounds, ())[ALL][side]
    if not one.pairs:
        return f"What it is worth beside {NAMES[side]} cannot be told yet: no comparison has ended."
    spent = (rounds[-1].time - rounds[0].time) / 60.0
    if not is_bounded(one):
        more = spent / max(one.pairs - 1, 1) * (FEWEST - one.pairs)
        return f"What it is worth cannot be told yet: about {_minutes(more)} more of such traffic."
    told = f"It makes {as_text(one)} times the tokens a second of {NAMES[side]}"
    if not one.low <= 1.0 <= one.high:
        return f"{told}."
    # an interval shrinks as the root of what it rests on grows
    half = math.log(one.high / one.low) / 2.0
    more = spent * ((half / max(abs(math.log(one.ratio)), CLOSE)) ** 2 - 1.0)
    return f"{told}: whether it is faster cannot be told yet, about {_minutes(more)} more."


def _minutes(many: float) -> str:
    return f"{max(1, math.ceil(many))} minute{'s' if many > 1.0 else ''}"


def _in_force(ledger: Ledger, worker: WorkerStatus | None) -> str:
    if worker is None:
        return "No worker has said anything yet."
    since = ""
    if worker.policy_applied_at:
        since = f" since {datetime.fromtimestamp(worker.policy_applied_at):%H:%M:%S}"
    kept = [p.policy for p in ledger.published if p.policy]
    card = next((p.provenance for p in kept if p.version == worker.policy_version), {})
    named = f"Policy version {worker.policy_version}"
    if not worker.policy_version:
        named = f"Policy {ledger.named(0)},"
    elif card.get("origin") == LEARNED:
        named += ", made by the learner,"
    elif card and card == first_or_counting(ANY_SCOPE).provenance:
        named += ", the policy that ships,"
    if worker.fallback:
        return f"{named} is in force{since}, but '{worker.fallback}' decides: it is faster now."
    return f"{named} decides{since}."


def _learned(learner: LearnerStatus | None) -> str:
    if learner is None:
        return "No learner has said anything yet."
    told = (
        f"The learner took in {learner.events_consumed} events, tried {learner.candidates} "
        f"candidates and promoted {learner.promotions}"
    )
    return f"{told}; {learner.rollout_said}." if learner.rollout_said else f"{told}."


def _troubles(
    ledger: Ledger, worker: WorkerStatus | None, learner: LearnerStatus | None
) -> Iterator[tuple[str, str]]:
    """What is wrong, each with the part whose log tells more."""
    now = time.time()
    for name, last in (("worker", worker), ("learner", learner)):
        if last is None or now - last.time > SILENT_S:
            quiet = "" if last is None else f" for {now - last.time:.0f} seconds"
            yield name, f"the {name} has said nothing{quiet}"
    if worker is not None:
        if worker.faults:
            yield "worker", f"{worker.faults} faults of the worker, which decoded plainly then"
        lost = {**worker.drops, **worker.events_refused, "left at its end": worker.events_failed}
        if told := _counted(lost):
            yield "worker", f"events of the worker are lost ({told})"
    if learner is not None:
        if learner.registry_away_since:
            yield "registry", "the registry does not answer: nothing is registered or promoted"
        if learner.faults:
            yield "learner", f"{learner.faults} records could not be learned from"
        if told := _counted(learner.given_up):
            yield "learner", f"registrations and moves were given up ({told})"
    if ledger.refused:
        yield "worker", f"{ledger.refused} records could not be read"


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in reasons.items() if count)
