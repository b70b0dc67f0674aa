"""``hvd demo``: the whole loop in a few minutes.

Start the stack as it ships; send one agent's session at a time, then three, then conversation;
break the drafter and mend it; have records copied, in which every copy breaks off at the same
place, until a policy of the learner's that foresees it is in force; make a policy champion by hand
that drafts nothing, a person's mistake, which the worker's floor relieves and the learner's gate
takes back. Meanwhile plain, stock suffix and EAGLE3 decoding are interleaved with the policy in
force. Phases that this machine has no time for are left out. Wait until every event has reached the
learner; stop; decode the answers once more by every rule in virtual time; write the report.
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

DEFAULT_MINUTES: Final = 6.5
"""Of traffic, at most, from when all parts are ready."""
ENOUGH: Final = 20
"""Pairs of each comparison after which a phase is over. By their number, and not by what they say:
so the interval need not be widened for every earlier look."""
ENOUGH_DRAFTS: Final = 300
"""Drafts that the learner's policy has foreseen when the phase that is for it is over."""
DRAIN_SECONDS: Final = 180.0
"""How long the learner may take in nothing new before what it has not is called lost."""
REPORT_SECONDS: Final = 600.0
"""Until worker and learner report their first status: beside busy processes the learner, which has
a low priority, takes minutes to start."""
HOME: Final = Path("var/demo")
SETTINGS: Final[Mapping[str, str]] = {
    "HVD_WORKER_VARIANTS": "plain,suffix,model",
    # three quarters of all steps: minutes have to show what a deployment sees in a day
    "HVD_WORKER_HOLDOUT": "0.75",
    "HVD_LEARNER_ROLLOUT": "off",  # a trial tells nothing within minutes: the gate decides alone
}
"""What the demo sets, where the environment says nothing else: who is compared, and how often."""


def run(minutes: float | None, console: Console, folder: Path) -> Summary:
    """Run the demo from start to stop; state of an earlier demo is removed first.

    Args:
        minutes: of traffic, at most; None: :data:`DEFAULT_MINUTES`.
        folder: gets ``summary.json``, which is returned, and the page.

    Raises:
        BrokerError, ProcessError, ModelError, RegistryError: a part did not start, or died.
    """
    ledger = Ledger(os.environ.get("HVD_WORKER_NAME", f"demo-{os.getpid()}"))
    home, ports = Home.under(HOME.resolve(), is_fresh=True), Ports.free()
    console.print(f"Logs in [bold]{HOME / 'logs'}[/bold].")
    with console.status("reading the prompts"):
        for workload in {w for plan in PLANS for w in plan.workloads}:
            next(prompts(workload))  # parses the standard library, once
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
    """Send the traffic that so many seconds have time for, and wait until all that was made of it
    is learned from: what was seen of it, and the phases whose answers compare rules."""
    ledger, children = traffic.ledger, stack.children
    for name, statuses in {"worker": ledger.statuses, "learner": ledger.learner}.items():
        # rates need a reading before the traffic
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
    with console.status("waiting until every event has reached the learner"):
        traffic.end()
        _wait_until_learned(stack, ledger, before)
    mistaken = outcome(ledger, by_hand) if by_hand else None
    sent = list(zip((plan for plan, _ in plans), ledger.phases, strict=True))
    (taught,) = (
        lesson(ledger, phase) | {"answers": len(traffic.answers.get(phase.name, ()))}
        for plan, phase in sent
        if plan.learns
    )
    for told, version in ((mistaken, "successor"), (taught, "version")):
        if told and told[version]:
            with suppress(RegistryError):  # a version may have been deleted since
                model = _model(stack.tracking_uri, ledger.scope)
                told["why"] = model.version(str(told[version])).tags.get("why", "")
    run = Run(traffic.counts, began, before, mistaken, taught, step_s, left_out)
    return run, [phase for plan, phase in sent if not (plan.learns or plan.mistake)]


def timing(step_s: float, seconds: float, left_out: Sequence[str]) -> str:
    """How fast the machine is, and what it therefore leaves out."""
    told = f"All parts are ready. A plain step takes {1e3 * step_s:.0f} ms"
    if left_out:
        minutes = f"{seconds / 60:.1f} minutes"
        told += f": {minutes} have no time for these phases: {', '.join(left_out)}"
    return f"{told}."


def write(ledger: Ledger, summary: Summary, folder: Path) -> None:
    """Write ``summary.json`` and ``report.html`` into ``folder``.

    Raises:
        SettingsError: they cannot be written.
    """
    made = f"{summary['tokens']} tokens in {summary['duration_s']:.0f} s on {summary['machine']}."
    sentences = [{"text": s} for s in (*summary["sentences"], *summary["failings"], made)]
    page = record(ledger, f"Adaptive decoding: a demo run, {summary['date'][:10]}", sentences)
    page["tiles"] += rule_tiles(summary)
    page["tables"] = [*rule_tables(summary), *page["tables"]]
    write_json(summary, folder / "summary.json")
    write_text(render(page), folder / "report.html")


def _run_phases(
    stack: Stack, traffic: Traffic, plans: Sequence[tuple[Plan, float]], console: Console
) -> int:
    """Send the traffic of all phases, each of so many seconds at most; the version that was
    promoted by mistake, or 0."""
    began, until, by_hand, ledger = time.monotonic(), 0.0, 0, traffic.ledger
    whole = sum(seconds for _, seconds in plans)
    with Shown(console) as bar:
        for plan, seconds in plans:
            breakage.set_broken(stack.api, plan.broken)
            traffic.begin(plan, seed=PLANS.index(plan))
            until += seconds  # a phase has what earlier ones left
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
