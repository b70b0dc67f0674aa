"""``hvd demo``: the whole loop in a few minutes.

Start the stack as it ships; send one agent's session at a time, then three, then conversation;
break the drafter and mend it; promote a bad policy by hand. Meanwhile interleave plain, stock
suffix and EAGLE3 decoding with the policy in force, and show what it is worth beside the best and
the worst of them; wait until every event has reached the learner; stop; write the report.

The policy that is promoted by hand is a person's mistake: it drafts nothing. The same command does
it that anybody would give. What follows is the service's own: the worker's floor puts the best
fixed method in force where it finds the policy behind, and the learner's gate judges every champion
against the policy before it, the one that ships among them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import ProcessError
from decoder.policy.probes import to_bytes
from pipelines.demo import breakage
from pipelines.demo.summary import Summary, summarise
from pipelines.demo.traffic import PLANS, Plan, Traffic
from pipelines.reports import Shown, write_json, write_text
from pipelines.stack.processes import wait_until
from pipelines.stack.running import HVD, TRACKING_VARIABLE, Home, Ports, Stack, running
from pipelines.watch.ledger import Ledger, Observer
from pipelines.watch.page import ALL, NAMES, Record, as_text, is_bounded, record, render, uplifts
from pipelines.workloads import prompts

DEFAULT_MINUTES: Final = 7.0
WHOLE_SECONDS: Final = 540.0
"""When the traffic of a demo whose length was not asked for ends, however slow the start was."""
CLEAR: Final = 1.2
"""A phase is over once each comparison of it says which is faster, or has an interval whose ends
are no further apart than this factor."""
SHORTEST_SECONDS: Final = 60.0
ALL_PHASES_SECONDS: Final = 240.0
"""Below this, further phases would leave none of them time to learn in."""
DRAIN_SECONDS: Final = 60.0
"""How long the learner may take in nothing new before what it has not is called lost."""
REPORT_SECONDS: Final = 30.0
"""Until a worker or a learner that runs has said something of itself."""
HOME: Final = Path("var/demo")
SETTINGS: Final[Mapping[str, str]] = {
    "HVD_WORKER_SIDES": "plain,suffix,model",
    # three quarters of all steps: minutes have to show what a deployment sees in a day
    "HVD_WORKER_HOLDOUT": "0.75",
    "HVD_LEARNER_ROLLOUT": "off",  # a trial tells nothing within minutes: the gate decides alone
}
"""What the demo sets, where the environment says nothing else: who is compared, and how often."""
FROM_SCRATCH: Final[Mapping[str, str]] = {
    "HVD_WORKER_START": "counting",
    "HVD_LEARNER_START": "counting",
    "HVD_WORKER_SIDES": "plain,suffix,model,first",
}
"""What ``--from-scratch`` sets as well: nothing is learned yet, and the policy that ships is one of
those compared."""


@dataclass(frozen=True)
class Run:
    """A demo that is over: ``summary.json``, and what its page shows."""

    summary: Summary
    page: Record


def phases_for(seconds: float) -> list[tuple[Plan, float]]:
    """The phases that fit into ``seconds`` of traffic, each with its own length."""
    plans = PLANS if seconds >= ALL_PHASES_SECONDS else PLANS[:2]
    whole = sum(plan.share for plan in plans)
    return [(plan, seconds * plan.share / whole) for plan in plans]


def traffic_seconds(minutes: float | None, spent: float) -> float:
    """The most time for traffic: as asked for, else the usual, shortened by a slow start."""
    if minutes is not None:
        return minutes * 60.0
    return max(SHORTEST_SECONDS, min(DEFAULT_MINUTES * 60.0, WHOLE_SECONDS - spent))


def is_clear(ledger: Ledger) -> bool:
    """Whether the running phase has pairs enough: see :data:`CLEAR`."""
    phase = ledger.phases[-1]
    effects = uplifts(list(ledger.rounds), [phase])[phase.name].values()
    return all(
        is_bounded(e) and (e.low > 1.0 or e.high < 1.0 or e.high < CLEAR * e.low) for e in effects
    )


def run(minutes: float | None, console: Console, from_scratch: bool = False) -> Run:
    """Run the demo from start to stop; state of an earlier demo is removed first.

    Args:
        minutes: of traffic, at most; None: what is left of nine minutes.
        from_scratch: begin with counted scores instead of the policy that ships.

    Raises:
        BrokerError, ProcessError, ModelError, RegistryError: a part did not start, or died.
    """
    started = time.monotonic()
    shutil.rmtree(HOME, ignore_errors=True)
    ledger = Ledger(worker=f"demo-{os.getpid()}")
    home, ports = Home.under(HOME.resolve()), Ports.free()
    console.print(f"Logs in [bold]{HOME / 'logs'}[/bold].")
    with console.status("reading the prompts"):
        for workload in {w for plan in PLANS for w in plan.workloads}:
            next(prompts(workload))  # parses the standard library, once
    settings = {**SETTINGS, **(FROM_SCRATCH if from_scratch else {}), **breakage.SETTINGS}
    assigned = ", ".join(f"{k}={os.environ.get(k, v)}" for k, v in settings.items())
    console.print(f"Set for the demo alone: {assigned}.", highlight=False, soft_wrap=True)
    with running(ports, home, console, ledger.worker, breakage.OPTIONS, settings) as stack:
        observer = Observer(stack.kafka, ledger)
        observer.start()
        traffic = Traffic(stack.api, stack.model, ledger)
        try:
            children = stack.children
            for name, statuses in {"worker": ledger.statuses, "learner": ledger.learner}.items():
                # rates need a reading before the traffic
                ready = partial(bool, statuses)
                wait_until(children[name], ready, REPORT_SECONDS, list(children.values()))
            before, began = ledger.consumed, time.time()
            phases = phases_for(traffic_seconds(minutes, time.monotonic() - started))
            by_hand = _run_phases(stack, traffic, phases, console)
            with console.status("waiting until every event has reached the learner"):
                traffic.end()
                _wait_until_learned(stack, ledger, before)
                mistaken = _mistaken(stack, ledger, by_hand)
        finally:
            traffic.stopping.set()
            observer.close()
    start = os.environ.get("HVD_WORKER_START", settings.get("HVD_WORKER_START", "first"))
    summary = summarise(ledger, traffic.counts, began, before, start, mistaken)
    return Run(summary, page_of(ledger, summary))


def page_of(ledger: Ledger, summary: Summary) -> Record:
    """What the page of a demo shows."""
    traffic = f"{summary['tokens']} tokens in {summary['duration_s']:.0f} s"
    facts = {"machine": summary["machine"], "traffic": f"{traffic} from {summary['date']}"}
    sentences = summary["sentences"] + summary["notes"] + summary["failings"]
    return record(ledger, "Adaptive decoding: a demo run", sentences, facts)


def _run_phases(
    stack: Stack, traffic: Traffic, phases: list[tuple[Plan, float]], console: Console
) -> int:
    """Send the traffic of all phases; the version that was promoted by mistake, or 0."""
    whole, earlier, by_hand, ledger = sum(seconds for _, seconds in phases), 0.0, 0, traffic.ledger
    with Shown(console) as bar:
        for index, (plan, seconds) in enumerate(phases):
            breakage.set_broken(stack.api, plan.broken)
            traffic.begin(plan, seed=index)
            began = time.monotonic()
            if plan.mistake and _has_champion(ledger):
                by_hand = promote(stack, ledger.scope, HOME)
            while (spent := time.monotonic() - began) < seconds and not _is_over(ledger, by_hand):
                stack.check()
                traffic.check()
                bar.step(f"{status_line(ledger)}; seconds", earlier + spent, whole)
                time.sleep(min(0.5, seconds - spent))
            earlier += seconds
    return by_hand


def _has_champion(ledger: Ledger) -> bool:
    """Whether the learner has published one that a mistake could take the place of."""
    return bool(ledger.learner) and ledger.learner[-1].champion_version > 0


def _is_over(ledger: Ledger, by_hand: int) -> bool:
    """Whether the running phase has shown what it is for."""
    if by_hand:
        found = outcome(ledger, by_hand)
        if found["relieved_s"] is None and found["taken_back_s"] is None:
            return False
    return is_clear(ledger)


def _mistaken(stack: Stack, ledger: Ledger, by_hand: int) -> dict[str, Any] | None:
    """What became of a policy that was promoted by hand, and why; None of none."""
    if not by_hand:
        return None
    found = outcome(ledger, by_hand)
    taken = found["taken_back_s"] is not None
    return found | {"why": reason(stack, ledger.scope) if taken else ""}


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
        if is_fresh and ledger.produced == ledger.consumed - before == ledger.drafts.seen:
            return
        if taken != (taken := ledger.consumed + ledger.drafts.seen):
            deadline = time.monotonic() + DRAIN_SECONDS
        time.sleep(0.2)
    if not is_fresh:
        raise ProcessError(f"worker or learner report nothing any more: see their logs in {HOME}.")


def write(run: Run, folder: Path) -> Path:
    """Write ``summary.json`` and the page into ``folder``; the page's path.

    Raises:
        SettingsError: they cannot be written.
    """
    write_json(run.summary, folder / "summary.json")
    write_text(render(run.page), folder / "report.html")
    return folder / "report.html"


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
MOVE_SECONDS: Final = 120.0
WHY: Final = "a mistake: it drafts nothing"


def promote(stack: Stack, scope: str, folder: Path) -> int:
    """Make a policy champion that drafts nothing; its version.

    Raises:
        ProcessError: it could not be promoted; with what the command said.
    """
    policy = Policy(scope, 0, NEVER, "frequency", use_model=False)
    bundle = folder / "drafts-nothing.safetensors"
    bundle.write_bytes(to_bytes(policy))
    told = _hvd(stack, "promote", str(bundle), "--force", "--why", WHY, "--scope", scope)
    return int(told["to"])


def reason(stack: Stack, scope: str) -> str:
    """Why the version that is served now was made champion, as the registry has it.

    Raises:
        ProcessError: it could not be asked.
    """
    (model,) = _hvd(stack, "list", "--scope", scope)
    tags = {one["version"]: one["tags"] for one in model["versions"]}
    return str(tags.get(model["served"], {}).get("why", ""))


def _hvd(stack: Stack, *arguments: str) -> Any:
    """What ``hvd policy`` prints as JSON."""
    try:
        done = subprocess.run(
            [*HVD, "policy", *arguments, "--json"],
            env={**os.environ, TRACKING_VARIABLE: stack.tracking_uri},
            capture_output=True, text=True, timeout=MOVE_SECONDS, check=True,
        )  # fmt: skip
        return json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        what = f"'hvd policy {arguments[0]}' did not work in the demo"
        raise ProcessError(f"{what}: {said} See the registry's log.") from error


def outcome(ledger: Ledger, version: int) -> dict[str, Any]:
    """What became of ``version`` on the worker: seconds after it came into force until the floor
    relieved it, and until another policy was in force; null is not yet."""
    switches = ledger.policy_switches()
    came = next((at for at, v in switches if v == version), None)
    if came is None:
        return {"version": version, "in_force": False, "relieved_s": None, "taken_back_s": None}
    gone = next((at for at, v in switches if at > came and v != version), None)
    floor = (s.time for s in list(ledger.statuses) if s.policy_version == version and s.fallback)
    relieved = next(floor, None)
    return {
        "version": version,
        "in_force": True,
        "relieved_s": None if relieved is None else round(relieved - came, 1),
        "taken_back_s": None if gone is None else round(gone - came, 1),
    }
