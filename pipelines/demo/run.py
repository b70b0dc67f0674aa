"""``hvd demo``: the whole loop in a few minutes.

1. Start the stack as it ships.
2. Send one agent's session at a time, then three, then conversation.
3. Break the drafter, and repair it.
4. Send records, whose copies all end at the same place, until a policy of the learner predicts it.
5. Promote a policy that drafts nothing. The worker falls back; the learner replaces the policy.
6. Wait until the learner has read every event, and stop.
7. Decode the answers again by every rule in virtual time, and write the report.

Plain, stock suffix and EAGLE3 decoding are interleaved with the serving policy. Phases are left out
if the machine has no time for them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import ProcessError, RegistryError
from decoder.policy.probes import to_bytes
from pipelines.demo import breakage
from pipelines.demo.replay import replayed
from pipelines.demo.summary import Run, Summary, lesson, rule_tables, rule_tiles, summarise
from pipelines.demo.traffic import PLANS, Plan, Traffic, plain_step_s, planned
from pipelines.policy import moves
from pipelines.reports import Shown, write_json, write_text
from pipelines.stack.processes import wait_until
from pipelines.stack.running import TRACKING_VARIABLE, Home, Ports, Stack, running
from pipelines.watch.ledger import Ledger, Observer, Phase
from pipelines.watch.page import ALL, NAMES, as_text, record, render, uplifts
from pipelines.workloads import prompts

DEFAULT_MINUTES: Final = 6.5  # most minutes of traffic, from when all parts are ready
ENOUGH: Final = 20
"""Pairs of each comparison that end a phase. Their number does not depend on the outcome, so the
interval need not be widened for repeated tests."""
ENOUGH_DRAFTS: Final = 300  # drafts predicted by the learner's policy that end its phase
DRAIN_SECONDS: Final = 180.0
"""How long the learner may read nothing new before the remaining events count as lost."""
REPORT_SECONDS: Final = 600.0
"""Time until the first status. On busy cores the learner, with its low priority, starts in
minutes."""
HOME: Final = Path("var/demo")
SETTINGS: Final[Mapping[str, str]] = {
    "HVD_WORKER_VARIANTS": "plain,suffix,model",
    # three quarters of all steps: a deployment has a day, the demo minutes
    "HVD_WORKER_HOLDOUT": "0.75",
    "HVD_LEARNER_ROLLOUT": "off",  # minutes are too short for a trial: the gate decides
}
"""Settings of the demo that the environment may override: which variants are compared, and how
often."""


def run(minutes: float | None, console: Console, folder: Path) -> Summary:
    """Run the demo; an earlier demo's state is removed first.

    Args:
        minutes: most minutes of traffic; None: :data:`DEFAULT_MINUTES`.
        folder: for ``summary.json``, which is returned, and the page.

    Raises:
        BrokerError, ProcessError, ModelError, RegistryError: a part did not start, or died.
    """
    ledger = Ledger(os.environ.get("HVD_WORKER_NAME", f"demo-{os.getpid()}"))
    home, ports = Home.under(HOME.resolve(), is_fresh=True), Ports.free()
    console.print(f"Logs in [bold]{HOME / 'logs'}[/bold].")
    with console.status("reading the prompts"):
        for workload in {w for plan in PLANS for w in plan.workloads}:
            next(prompts(workload))  # parses the standard library once
    settings = {**SETTINGS, **breakage.SETTINGS}
    assigned = ", ".join(f"{k}={os.environ.get(k, v)}" for k, v in settings.items())
    console.print(f"Set for the demo alone: {assigned}.", highlight=False, soft_wrap=True)
    settings["HVD_WORKER_NAME"] = ledger.worker
    seconds = 60.0 * (DEFAULT_MINUTES if minutes is None else minutes)
    with (
        running(ports, home, console, breakage.OPTIONS, settings) as stack,
        Observer(stack.kafka, ledger),
    ):
        traffic = Traffic(stack.api, stack.model, ledger)
        try:
            seen, phases = _served(stack, traffic, seconds, console)
        finally:
            traffic.stopping.set()
    with Shown(console) as bar:
        virtual = replayed(ledger, phases, traffic.answers, bar.step)
    summary = summarise(ledger, seen, virtual)
    write(ledger, summary, folder)
    return summary


def _served(
    stack: Stack, traffic: Traffic, seconds: float, console: Console
) -> tuple[Run, list[Phase]]:
    """Send the traffic that fits into ``seconds``, and wait until it has been learned from. Returns
    what was observed, and the phases whose answers compare rules."""
    ledger, children = traffic.ledger, stack.children
    for name, statuses in {"worker": ledger.statuses, "learner": ledger.learner}.items():
        # rates need a status before the traffic
        ready = partial(bool, statuses)
        with console.status(f"waiting for the first status of the {name}"):
            wait_until(children[name], ready, REPORT_SECONDS, list(children.values()))
    before, began = ledger.consumed, time.time()
    with console.status("timing plain steps"):
        step_s = plain_step_s(stack.api, stack.model)
    plans = planned(step_s, seconds)
    left_out = [plan.name for plan in PLANS if plan not in dict(plans)]
    console.print(timing(step_s, seconds, left_out), highlight=False, soft_wrap=True)
    by_hand = _run_phases(stack, traffic, plans, console)
    with console.status("waiting until the learner has read every event"):
        traffic.end()
        _wait_until_learned(stack, ledger, before)
    mistaken = outcome(ledger, by_hand) if by_hand else None
    sent = list(zip((plan for plan, _ in plans), ledger.phases, strict=True))
    (learned,) = (
        lesson(ledger, phase) | {"answers": len(traffic.answers.get(phase.name, ()))}
        for plan, phase in sent
        if plan.learns
    )
    for each, version in ((mistaken, "successor"), (learned, "version")):
        if each and each[version]:
            with suppress(RegistryError):  # a version may have been deleted since
                model = _model(stack.tracking_uri, ledger.scope)
                each["why"] = model.version(str(each[version])).tags.get("why", "")
    run = Run(traffic.counts, began, before, mistaken, learned, step_s, left_out)
    return run, [phase for plan, phase in sent if not (plan.learns or plan.mistake)]


def timing(step_s: float, seconds: float, left_out: Sequence[str]) -> str:
    """A sentence about the machine's speed and the phases left out."""
    text = f"All parts are ready. A plain step takes {1e3 * step_s:.0f} ms"
    if left_out:
        minutes = f"{seconds / 60:.1f} minutes"
        text += f": {minutes} are too short for these phases: {', '.join(left_out)}"
    return f"{text}."


def write(ledger: Ledger, summary: Summary, folder: Path) -> None:
    """Write ``summary.json`` and ``report.html`` into ``folder``.

    Raises:
        SettingsError: they cannot be written.
    """
    footer = f"{summary['tokens']} tokens in {summary['duration_s']:.0f} s on {summary['machine']}."
    sentences = [{"text": s} for s in (*summary["sentences"], *summary["failings"], footer)]
    page = record(ledger, f"Adaptive decoding: a demo run, {summary['date'][:10]}", sentences)
    page["tiles"] += rule_tiles(summary)
    page["tables"] = [*rule_tables(summary), *page["tables"]]
    write_json(summary, folder / "summary.json")
    write_text(render(page), folder / "report.html")


def _run_phases(
    stack: Stack, traffic: Traffic, plans: Sequence[tuple[Plan, float]], console: Console
) -> int:
    """Send the traffic of all phases, each for its seconds at most. Returns the version that was
    promoted by mistake, or 0."""
    began, until, by_hand, ledger = time.monotonic(), 0.0, 0, traffic.ledger
    whole = sum(seconds for _, seconds in plans)
    with Shown(console) as bar:
        for plan, seconds in plans:
            breakage.set_broken(stack.api, plan.broken)
            traffic.begin(plan, seed=PLANS.index(plan))
            until += seconds  # a phase gets what earlier ones left
            # the learner must have a champion to replace
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
    """Whether the running phase has shown its purpose."""
    if by_hand:
        return outcome(ledger, by_hand)["taken_back_s"] is not None
    phase = ledger.phases[-1]
    if plan.learns:
        after = lesson(ledger, phase)["after"]
        return after is not None and after["drafts"] >= ENOUGH_DRAFTS
    effects = uplifts(list(ledger.rounds), [phase])[phase.kind].values()
    return all(one.pairs >= ENOUGH for one in effects)


def _wait_until_learned(stack: Stack, ledger: Ledger, before: int) -> None:
    """Wait until the learner has read all of the worker's events, or reads no more of them. Raises
    ProcessError if worker or learner stopped reporting."""
    quiet = time.time() + 1.5  # statuses from then on include the last request
    read, deadline, is_fresh = 0, time.monotonic() + DRAIN_SECONDS, False
    while time.monotonic() < deadline:
        stack.check()
        is_fresh = min(ledger.statuses[-1].time, ledger.learner[-1].time) > quiet
        if is_fresh and ledger.produced == ledger.consumed - before == ledger.seen:
            return
        if read != (read := ledger.consumed + ledger.seen):
            deadline = time.monotonic() + DRAIN_SECONDS
        time.sleep(0.2)
    if not is_fresh:
        raise ProcessError(f"worker or learner stopped reporting: see their logs in {HOME}.")


def status_line(ledger: Ledger) -> str:
    """The state of a run in one line."""
    over = uplifts(list(ledger.rounds), ())[ALL]
    worth = ", ".join(f"over {NAMES[side]} {as_text(whole)}" for side, whole in over.items())
    policy = f"v{ledger.statuses[-1].policy_version}" if ledger.statuses else "-"
    candidates = ledger.learner[-1].candidates if ledger.learner else 0
    return (
        f"{ledger.phases[-1].name}: {worth}, policy {policy}, events {ledger.produced} made "
        f"{ledger.consumed} learned from, candidates {candidates}"
    )


NEVER: Final = 1e9  # a threshold in accepted tokens that no draft reaches
WHY: Final = "a mistake: it drafts nothing"


def promote(uri: str, scope: str, folder: Path) -> int:
    """Promote a policy that drafts nothing in the registry at ``uri``.

    Returns:
        its version.

    Raises:
        RegistryError: it could not be promoted.
    """
    bundle = folder / "drafts-nothing.safetensors"
    bundle.write_bytes(to_bytes(Policy(scope, 0, NEVER, "frequency", use_model=False)))
    return int(moves.promote(_model(uri, scope), str(bundle), WHY, force=True)["to"])


def _model(uri: str, scope: str) -> moves.Model:
    os.environ[TRACKING_VARIABLE] = uri  # as a person would set it
    return moves.one_model(scope)


def outcome(ledger: Ledger, version: int) -> dict[str, Any]:
    """What became of ``version`` on the worker: seconds from when it was loaded until the worker
    fell back, and until another policy, its ``successor``, was loaded. null: not yet."""
    switches = ledger.policy_switches()
    loaded = next((at for at, v in switches if v == version), None)
    own = [s for s in list(ledger.statuses) if s.policy_version == version]
    later = [(at, v) for at, v in switches if loaded is not None and at > loaded and v != version]
    after_it, successor = (*later, (None, None))[0]
    times = {
        "relieved_s": next((s.time for s in own if s.fallback), None),
        "taken_back_s": after_it,
    }
    after = {k: None if at is None else round(at - (loaded or at), 1) for k, at in times.items()}
    return {"version": version, "in_force": loaded is not None, "successor": successor, **after}
