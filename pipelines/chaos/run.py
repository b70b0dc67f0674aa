"""One trouble after another under load, and what came of each."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from pipelines import machine
from pipelines.chaos.clients import Client, Seen, answer_of
from pipelines.chaos.heard import Account, Heard
from pipelines.chaos.stage import DRAIN_S, Stage
from pipelines.chaos.troubles import PARTS, Found, Trouble
from pipelines.stack.running import HVD, Home, Ports, responds, running
from pipelines.workloads import Prompt, prompts

CLIENTS: Final = 3
KINDS: Final = ("edits", "tools", "qa", "chat")
EACH: Final = 4
STANDIN: Final = (HVD[0], "-m", "pipelines.chaos.standin")
ANSWER_S: Final = 330.0
"""A client that is told to stop ends with its answer; no request lasts longer."""
DYING_S: Final = 2.0
"""A socket of a killed worker takes connections while its memory is freed."""
UNDER_WAY_S: Final = 0.2
SAID_S: Final = 1.5
"""A worker says how it is once a second."""
SEEN_S: Final = 10.0
"""After which what is on the topic has been read."""
SETTLE_S: Final = 3.0
"""At most, drawn by seed: the blow falls on requests at any place of theirs."""
SETTINGS: Final = {
    machine.FLAGS_VARIABLE: "avx2",  # float32: answers are compared token for token
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HVD_LEARNER_ROLLOUT": "off",  # what wins is published at once: more publications to order
    "HVD_LEARNER_START": "counting",
    "HVD_LEARNER_MIN_EVENTS": "200",
    "HVD_LEARNER_CANDIDATE_EVERY": "64",
    "HVD_LEARNER_ROWS_PER_SECOND": "1000",
    "HVD_LEARNER_BUFFER_EVENTS": "2000",  # full within minutes, so that a soak sees no filling
}


@dataclass(frozen=True)
class Incident:
    """A trouble and what was seen of it; seconds. ``faults`` must be empty.

    ``account`` is of the worker that lives at its end; ``figures`` are the trouble's own.
    """

    name: str
    back_s: dict[str, float]
    requests: int
    errors: int
    waited: int
    slowest_s: float
    account: Account
    figures: dict[str, float]
    faults: list[str]


@dataclass
class Scene:
    """A stage with its audience: what is asked, and the right answers."""

    stage: Stage
    heard: Heard
    asked: Sequence[Prompt]
    answers: list[tuple[int, ...]]
    broker_forgot: bool = False  # since it was killed without a warning

    def ask(self, prompt: Prompt, streams: bool = False) -> tuple[int, ...]:
        """One answer's tokens."""
        return answer_of(self.stage.stack.api, self.stage.stack.model, prompt, streams)


@contextmanager
def scene(folder: Path, standin: bool, console: Console) -> Iterator[Scene]:
    """A stack of its own in ``folder``, on free ports, and its answers before anything happened.

    Raises:
        BrokerError, ProcessError, ModelError, RegistryError: it did not come up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in (*astuple(Home.under(folder)), folder / "second", folder / "spill"):
        shutil.rmtree(left, ignore_errors=True)  # an earlier run's, which would be counted
    settings = {
        **SETTINGS,
        "HVD_WORKER_SPILL_FOLDER": str(folder.resolve() / "spill"),
        "HVD_KAFKA_POLICY_KEY": secrets.token_hex(16),
    }
    worker = STANDIN if standin else (*HVD, "serve")
    drain = () if standin else ("--", f"--shutdown-timeout={DRAIN_S:.0f}")
    asked = [prompt for kind in KINDS for prompt in islice(prompts(kind), EACH)]
    with running(
        Ports.free(), Home.under(folder), console, settings=settings, worker=worker,
        serve_options=drain,
    ) as stack, Heard(stack.kafka) as heard:  # fmt: skip
        made = Scene(Stage(stack, folder.resolve(), heard), heard, asked, [])
        made.answers.extend(made.ask(prompt) for prompt in asked)
        yield made


@contextmanager
def clients(scene: Scene) -> Iterator[list[Client]]:
    """Clients that ask for as long as the block lasts, every other one by streams."""
    made = [Client(partial(scene.ask, streams=bool(i % 2)), scene.asked, i) for i in range(CLIENTS)]
    threads = [threading.Thread(target=client.run, daemon=True) for client in made]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        for client in made:
            client.stopping.set()
        for thread in threads:
            thread.join(ANSWER_S)


def make_trouble(scene: Scene, trouble: Trouble, draw: random.Random) -> Incident:
    """Make it under load, wait until all that it hit works again, and judge what was seen."""
    stage, heard = scene.stage, scene.heard
    stage.until("all parts to run", lambda: all(map(stage.serves, stage.watches)))
    for watch in stage.watches.values():
        watch.attempts = 0  # else each trouble would lengthen the pause after the next
    _quiet(scene)
    known = len(heard.faults)
    accounts = {life: heard.account(life) for life in list(heard.told)}
    with clients(scene) as asking:
        stage.until("requests under way", lambda: all(map(_is_under_way, asking)))
        stage.wait(draw.random() * SETTLE_S)
        before = {name: stage.pid(name) for name in PARTS}
        began = time.monotonic()
        look = trouble.act(stage, draw)
        since = time.monotonic() if trouble.lasts else began
        back: dict[str, float] = {}

        def all_back() -> bool:
            for name in trouble.heals:
                anew = name not in trouble.kills or stage.pid(name) not in (0, before[name])
                if name not in back and anew and _works(scene, name, since, asking):
                    back[name] = time.monotonic() - since
            return len(back) == len(trouble.heals)

        stage.until(f"{', '.join(trouble.heals)} to come back", all_back)
        answered = [len(client.seen) for client in asking]
        stage.until(
            "an answer to every client",
            lambda: all(len(c.seen) > n + 1 for c, n in zip(asking, answered, strict=True)),
        )
    well = since + max(back.values(), default=0.0)
    _quiet(scene)
    life = heard.workers[-1].life
    account = heard.account(life).since(accounts.get(life, Account()))
    found = look(stage) if look is not None else Found({})
    seen = [s for client in asking for s in client.seen]
    touched = [s for s in seen if s.ended >= began and s.began <= well]
    faults = [*_wrong(scene, trouble, seen, began, well), *heard.faults[known:]]
    faults += [*_unaccounted(scene, trouble, account), *_forgotten(scene, trouble), *found.faults]
    if heard.counted > heard.made:
        faults.append(f"{heard.counted} events counted of {heard.made} made")
    return Incident(
        trouble.name,
        {name: round(seconds, 1) for name, seconds in back.items()},
        len(touched),
        sum(s.outcome == "error" for s in touched),
        sum(s.refused > 0 and s.outcome == "answered" for s in touched),
        round(max((s.ended - s.began for s in touched if s.outcome == "answered"), default=0.0), 1),
        account,
        dict(found.figures),
        faults,
    )


def _quiet(scene: Scene) -> None:
    """Wait, while nobody asks, until the worker has told of all it made, and that is seen."""
    heard, began = scene.heard, time.monotonic()

    def is_told() -> bool:
        if not heard.workers or not heard.since(began + SAID_S, heard.workers[-1].process):
            return False
        account = heard.account(heard.workers[-1].life)
        return not account.waiting and not account.unaccounted

    scene.stage.until("the worker to have nothing more to tell", is_told)
    # records and statuses come by partition, the latter perhaps first
    scene.stage.within(SEEN_S, lambda: heard.account(heard.workers[-1].life).adds_up)


def _unaccounted(scene: Scene, trouble: Trouble, account: Account) -> Iterator[str]:
    if not (account.adds_up or trouble.forgets):
        yield (
            f"{account.missing} events are missing, {account.lost} were counted as lost and "
            f"{account.in_doubt} as in doubt"
        )


def _forgotten(scene: Scene, trouble: Trouble) -> Iterator[str]:
    """Events of any life that the broker acknowledged in this run and that nobody saw there."""
    scene.broker_forgot |= trouble.forgets
    for life, said in scene.heard.told.items():
        if said.events_sent > len(scene.heard.numbers[life]) and not scene.broker_forgot:
            yield f"of {said.events_sent} events sent by {life} some are not on the topic"


def _works(scene: Scene, name: str, since: float, asking: Sequence[Client]) -> bool:
    """Whether the part was seen at its work after ``since``."""
    stage = scene.stage
    if name == "broker":  # what was said since has come through it
        return scene.heard.since(since)
    if name == "learner":
        return scene.heard.since(since, f"-{stage.pid(name)}")
    if name == "registry":
        return stage.serves(name) and responds(f"{stage.stack.tracking_uri}/health")
    return any(s.began > since and s.outcome == "answered" for c in asking for s in list(c.seen))


def _wrong(
    scene: Scene, trouble: Trouble, seen: Sequence[Seen], began: float, well: float
) -> Iterator[str]:
    for each in seen:
        if each.outcome == "answered" and each.tokens != scene.answers[each.prompt]:
            yield f"a wrong answer to {scene.asked[each.prompt].id}"
        dying = "worker" in trouble.kills and began <= each.ended and each.began <= well + DYING_S
        if each.outcome == "error" and not dying:
            yield f"a request failed: {each.what}"
        if each.refused and not (dying or trouble.drains):
            yield "a request was refused"


def _is_under_way(client: Client) -> bool:
    since = client.asking_since
    return since is not None and time.monotonic() - since > UNDER_WAY_S


def record(incidents: Sequence[Incident], heard: Heard, seed: int, standin: bool) -> dict[str, Any]:
    """All that a run has to say, for a file."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine.description(),
        "load": round(os.getloadavg()[0], 1),
        "seed": seed,
        "worker": "stand-in" if standin else "vLLM, embedded model, float32",
        "incidents": [asdict(each) for each in incidents],
        "events": {"made": heard.made, "on the topic": heard.distinct, "counted": heard.counted},
        "publications": sum(map(len, heard.published.values())),
    }


def faults_of(found: Mapping[str, Any]) -> list[str]:
    """Every fault of a run, with its trouble."""
    return [f"{i['name']}: {fault}" for i in found["incidents"] for fault in i["faults"]]
