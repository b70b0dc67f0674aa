"""``hvd demo``: the whole loop in a few minutes.

Start the stack as it ships; send one agent's session at a time, then three, then conversation;
break the drafter and mend it; have records copied, in which every copy breaks off at the same
place, until a policy of the learner's that foresees it is in force; make a policy champion by hand
that drafts nothing, a person's mistake, which the worker's floor relieves and the learner's gate
takes back. Meanwhile plain, stock suffix and EAGLE3 decoding are interleaved with the policy in
force. Wait until every event has reached the learner; stop; write the report.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import ProcessError, RegistryError
from decoder.policy.probes import to_bytes
from pipelines.demo import breakage
from pipelines.demo.summary import Summary, lesson, summarise
from pipelines.demo.traffic import PLANS, Plan, Traffic
from pipelines.policy import moves
from pipelines.reports import Shown, write_json, write_text
from pipelines.stack.processes import wait_until
from pipelines.stack.running import TRACKING_VARIABLE, Home, Ports, Stack, running
from pipelines.watch.ledger import Ledger, Observer
from pipelines.watch.page import ALL, NAMES, as_text, record, render, uplifts
from pipelines.workloads import prompts

DEFAULT_MINUTES: Final = 7.0
WHOLE_SECONDS: Final = 540.0
"""When the traffic of a demo whose length was not asked for ends, however slow the start was."""
ENOUGH: Final = 20
"""Pairs of each comparison after which a phase is over. By their number, and not by what they say:
so the interval need not be widened for every earlier look."""
ENOUGH_DRAFTS: Final = 300
"""Drafts that the learner's policy has foreseen when the phase that is for it is over."""
SHORTEST_SECONDS: Final = 60.0
DRAIN_SECONDS: Final = 60.0
"""How long the learner may take in nothing new before what it has not is called lost."""
REPORT_SECONDS: Final = 30.0
"""Until a worker or a learner that runs has said something of itself."""
HOME: Final = Path("var/demo")
SETTINGS: Final[Mapping[str, str]] = {
    "HVD_WORKER_VARIANTS": "plain,suffix,model",
    # three quarters of all steps: minutes have to show what a deployment sees in a day
    "HVD_WORKER_HOLDOUT": "0.75",
    "HVD_LEARNER_ROLLOUT": "off",  # a trial tells nothing within minutes: the gate decides alone
}
"""What the demo sets, where the environment says nothing else: who is compared, and how often."""


def traffic_seconds(minutes: float | None, spent: float) -> float:
    """The most time for traffic: as asked for, else the usual, shortened by a slow start."""
    if minutes is not None:
        return minutes * 60.0
    return max(SHORTEST_SECONDS, min(DEFAULT_MINUTES * 60.0, WHOLE_SECONDS - spent))


def run(minutes: float | None, console: Console, folder: Path) -> Summary:
    """Run the demo from start to stop; state of an earlier demo is removed first.

    Args:
        minutes: of traffic, at most; None: what is left of nine minutes.
        folder: gets ``summary.json``, which is returned, and the page.

    Raises:
        BrokerError, ProcessError, ModelError, RegistryError: a part did not start, or died.
    """
    started = time.monotonic()
    shutil.rmtree(HOME, ignore_errors=True)
    ledger = Ledger(os.environ.get("HVD_WORKER_NAME", f"demo-{os.getpid()}"))
    home, ports = Home.under(HOME.resolve()), Ports.free()
    console.print(f"Logs in [bold]{HOME / 'logs'}[/bold].")
    with console.status("reading the prompts"):
        for workload in {w for plan in PLANS for w in plan.workloads}:
            next(prompts(workload))  # parses the standard library, once
    settings = {**SETTINGS, **breakage.SETTINGS}
    assigned = ", ".join(f"{k}={os.environ.get(k, v)}" for k, v in settings.items())
    console.print(f"Set for the demo alone: {assigned}.", highlight=False, soft_wrap=True)
    settings["HVD_WORKER_NAME"] = ledger.worker
    with (
        running(ports, home, console, breakage.OPTIONS, settings) as stack,
        Observer(stack.kafka, ledger),
    ):
        traffic = Traffic(stack.api, stack.model, ledger)
        try:
            children = stack.children
            for name, statuses in {"worker": ledger.statuses, "learner": ledger.learner}.items():
                # rates need a reading before the traffic
                ready = partial(bool, statuses)
                wait_until(children[name], ready, REPORT_SECONDS, list(children.values()))
            before, began = ledger.consumed, time.time()
            seconds = traffic_seconds(minutes, time.monotonic() - started)
            by_hand = _run_phases(stack, traffic, seconds, console)
            with console.status("waiting until every event has reached the learner"):
                traffic.end()
                _wait_until_learned(stack, ledger, before)
                mistaken = outcome(ledger, by_hand) if by_hand else None
                (taught,) = (
                    lesson(ledger, phase) | {"answers": traffic.answers[phase.name]}
                    for plan, phase in zip(PLANS, ledger.phases, strict=True)
                    if plan.learns
                )
                for told, version in ((mistaken, "successor"), (taught, "version")):
                    if told and told[version]:
                        with suppress(RegistryError):  # a version may have been deleted since
                            model = _model(stack.tracking_uri, ledger.scope)
                            told["why"] = model.version(str(told[version])).tags.get("why", "")
        finally:
            traffic.stopping.set()
    summary = summarise(ledger, traffic.counts, began, before, mistaken, taught)
    write(ledger, summary, folder)
    return summary


def write(ledger: Ledger, summary: Summary, folder: Path) -> None:
    """Write ``summary.json`` and ``report.html`` into ``folder``.

    Raises:
        SettingsError: they cannot be written.
    """
    made = f"{summary['tokens']} tokens in {summary['duration_s']:.0f} s on {summary['machine']}."
    sentences = [{"text": s} for s in (*summary["sentences"], *summary["failings"], made)]
    page = record(ledger, f"Adaptive decoding: a demo run, {summary['date'][:10]}", sentences)
    write_json(summary, folder / "summary.json")
    write_text(render(page), folder / "report.html")


def _run_phases(stack: Stack, traffic: Traffic, whole: float, console: Console) -> int:
    """Send the traffic of all phases, of ``whole`` seconds at most; the version that was promoted
    by mistake, or 0."""
    began, until, by_hand, ledger = time.monotonic(), 0.0, 0, traffic.ledger
    with Shown(console) as bar:
        for index, plan in enumerate(PLANS):
            breakage.set_broken(stack.api, plan.broken)
            traffic.begin(plan, seed=index)
            until += whole * plan.share  # a phase has what earlier ones left
            # only a champion of the learner's can have its place taken
            if plan.mistake and ledger.learner and ledger.learner[-1].champion_version:
                by_hand = promote(stack.tracking_uri, ledger.scope, HOME)
            while (spent := time.monotonic() - began) < until and not is_over(
                ledger, plan, by_hand
            ):
                stack.check()
                traffic.check()
                bar.step(f"{status_line(ledger)}; seconds", spent, whole)
                time.sleep(min(0.5, until - spent))
    return by_hand


def is_over(ledger: Ledger, plan: Plan, by_hand: int) -> bool:
    """Whether the running phase, ``plan``'s, has shown what it is for."""
    if by_hand:
        return outcome(ledger, by_hand)["taken_back_s"] is not None
    phase = ledger.phases[-1]
    if plan.learns:
        after = lesson(ledger, phase)["after"]
        return after is not None and after["drafts"] >= ENOUGH_DRAFTS
    effects = uplifts(list(ledger.rounds), [phase])[phase.kind].values()
    return all(one.pairs >= ENOUGH for one in effects)


def _wait_until_learned(stack: Stack, ledger: Ledger, before: int) -> None:
    """Wait until the learner has every event the worker made, or takes in no more of them.

    Raises:
        ProcessError: worker or learner say nothing any more, or nothing of it can be read.
    """
    quiet = time.time() + 1.5  # a status sent after the last request's labels
    taken, deadline, is_fresh = 0, time.monotonic() + DRAIN_SECONDS, False
    while time.monotonic() < deadline:
        stack.check()
        is_fresh = min(ledger.statuses[-1].time, ledger.learner[-1].time) > quiet
        if is_fresh and ledger.produced == ledger.consumed - before == ledger.seen:
            return
        if taken != (taken := ledger.consumed + ledger.seen):
            deadline = time.monotonic() + DRAIN_SECONDS
        time.sleep(0.2)
    if not is_fresh:
        raise ProcessError(f"worker or learner report nothing any more: see their logs in {HOME}.")


def status_line(ledger: Ledger) -> str:
    """The state of a run in one line of text."""
    over = uplifts(list(ledger.rounds), ())[ALL]
    worth = ", ".join(f"over {NAMES[side]} {as_text(whole)}" for side, whole in over.items())
    policy = f"v{ledger.statuses[-1].policy_version}" if ledger.statuses else "-"
    candidates = ledger.learner[-1].candidates if ledger.learner else 0
    return (
        f"{ledger.phases[-1].name}: {worth}, policy {policy}, events {ledger.produced} made "
        f"{ledger.consumed} learned from, candidates {candidates}"
    )


NEVER: Final = 1e9
"""Accepted tokens that no draft is expected to reach."""
WHY: Final = "a mistake: it drafts nothing"


def promote(uri: str, scope: str, folder: Path) -> int:
    """Make a policy champion, in the registry at ``uri``, that drafts nothing; its version.

    Raises:
        RegistryError: it could not be promoted.
    """
    bundle = folder / "drafts-nothing.safetensors"
    bundle.write_bytes(to_bytes(Policy(scope, 0, NEVER, "frequency", use_model=False)))
    return int(moves.promote(_model(uri, scope), str(bundle), WHY, force=True)["to"])


def _model(uri: str, scope: str) -> moves.Model:
    os.environ[TRACKING_VARIABLE] = uri  # where a person would look
    return moves.one_model(scope)


def outcome(ledger: Ledger, version: int) -> dict[str, Any]:
    """What became of ``version`` on the worker: seconds after it came into force until the floor
    relieved it, and until another policy, its ``successor``, was in force; null is not yet."""
    switches = ledger.policy_switches()
    came = next((at for at, v in switches if v == version), None)
    mine = [s for s in list(ledger.statuses) if s.policy_version == version]
    later = [(at, v) for at, v in switches if came is not None and at > came and v != version]
    gone, successor = (*later, (None, None))[0]
    times = {"relieved_s": next((s.time for s in mine if s.fallback), None), "taken_back_s": gone}
    after = {k: None if at is None else round(at - (came or at), 1) for k, at in times.items()}
    return {"version": version, "in_force": came is not None, "successor": successor, **after}
