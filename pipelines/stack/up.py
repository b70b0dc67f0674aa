"""``hvd up``: the stack, kept up until Ctrl-C, and what to try on it first.

What ends is started again, with growing pauses, and said. One part's trouble is no other's: nothing
here waits for a part to be ready. Process supervisors of others want a configuration or a daemon of
their own, or end everything with the first that ends.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from rich.console import Console
from rich.markup import escape

from decoder.contracts.errors import ProcessError
from decoder.contracts.masking import without_login
from decoder.contracts.topics import STATUS
from pipelines import machine
from pipelines.stack import processes
from pipelines.stack.processes import Child, Part, begin
from pipelines.stack.running import KEY_VARIABLE, Home, Ports, Stack, running


def up(ports: Ports, page_port: int, home: Home, console: Console) -> NoReturn:
    """Start the stack and its page, and start again whatever ends; leave by an interrupt.

    Raises:
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; everything is stopped by then.
        BrokerError, ProcessError, ModelError, RegistryError: a part did not come up at first.
    """
    from pipelines.watch.live import (
        links_to,
        serving,
    )  # late: who only keeps parts up needs no page

    # known before a minute has gone into the rest
    machine.check_free(page_port, "choose another with --page-port")
    with running(ports, home, console) as stack:
        logs = {name: part.log for name, part in stack.parts.items()}
        links = links_to(stack.api, stack.tracking_uri, logs)
        with serving(stack.kafka, page_port, links, logs, first_request(stack)) as page:
            console.print(greeting(stack, page, home), highlight=False, soft_wrap=True)
            keep(stack.parts, stack.children, lambda what: say(console, what))


def say(console: Console, what: str) -> None:
    """Print ``what`` with the time of day; never raises."""
    line = f"{time.strftime('%H:%M:%S')} {escape(what)}"
    with suppress(Exception):  # a full disk, a pipe that nobody reads: what is served goes on
        console.print(line, highlight=False, soft_wrap=True)


def first_request(stack: Stack) -> str:
    """A command that asks something."""
    messages = [{"role": "user", "content": "Name three rivers."}]
    asked = {"model": stack.model, "messages": messages, "max_tokens": 64, "temperature": 0}
    url = f"{stack.api}/v1/chat/completions -H 'Content-Type: application/json'"
    if os.environ.get(KEY_VARIABLE):  # which the worker has as well
        url += f' -H "Authorization: Bearer ${KEY_VARIABLE}"'
    if any(name.lower().endswith("_proxy") for name in os.environ):
        url = f"--noproxy '*' {url}"
    return f"curl -s {url} -d {shlex.quote(json.dumps(asked))}"


def greeting(stack: Stack, page: str, home: Home) -> str:
    """Where everything is, and a command for each thing worth trying first, as rich markup."""
    kafka = stack.kafka.bootstrap_servers
    folder = Path(os.path.relpath(Path(sys.executable).parent))  # .venv/bin, in a checkout
    python, hvd = (shlex.quote(str(folder / name)) for name in ("python", "hvd"))
    text = f"""
API     {stack.api}/v1
Page    {page}
MLflow  {without_login(stack.tracking_uri)}
Kafka   {kafka}
Logs    {home.root / "logs"}

# a request
{first_request(stack)}

# what worker and learner say, once a second
{python} -m kafka.consumer -b {kafka} -t {STATUS.name}

# the policies so far: the first comes after a hundred drafts
{hvd} policy list

What ends is started again. Ctrl-C stops everything.
"""
    return re.sub("^# .*", r"[dim]\g<0>[/dim]", escape(text), flags=re.M)


SAID_CHARACTERS: Final = 160
"""Of a log's last line: a screen's line or two."""


LONGEST: Final = 60.0
"""Of the pauses before new tries, each twice the one before it, from one on. What has served for so
long begins anew."""
LOOK: Final = 0.2
"""Between two looks."""


@dataclass
class Watch:
    """What is known of one part, in seconds of the monotonic clock.

    ``due`` is when a part that is down is started, or one that starts must serve at the latest.
    """

    part: Part
    attempts: int = 0
    down_since: float = field(default_factory=time.monotonic)
    serves_since: float | None = None
    due: float = 0.0


def keep(
    parts: Mapping[str, Part],
    children: dict[str, Child],
    say: Callable[[str], None],
    second: float = 1.0,
) -> NoReturn:
    """Start again whatever of ``parts`` ends, until an interrupt is raised.

    Pauses are in units of ``second`` seconds. ``children`` holds their processes; who ended is
    taken out, who was started is put in.
    """
    now = time.monotonic()
    watches = [Watch(part, serves_since=now) for part in parts.values()]
    while True:
        for watch in watches:
            look(watch, children, say, second)
        time.sleep(LOOK * second)


def look(
    watch: Watch, children: dict[str, Child], say: Callable[[str], None], second: float = 1.0
) -> None:
    """Do what one part needs now; waits for nothing but a child that is to be stopped."""
    part, now, trouble = watch.part, time.monotonic(), ""
    child = children.get(part.name)
    if child is None:
        if now < watch.due:
            return
        watch.due = now + part.patience_s
        try:
            begin(part, children, again=True)
        except ProcessError as error:
            trouble = str(error)
    elif not child.is_alive:
        trouble = child.ending()
    elif watch.serves_since is not None:
        if now - watch.serves_since >= LONGEST * second:
            watch.attempts = 0
    elif _is_ready(part):
        watch.serves_since = time.monotonic()
        say(f"{part.name} runs again, {watch.serves_since - watch.down_since:.0f} s after it ended")
    elif now > watch.due:
        trouble = "was not ready in time"
    if not trouble:
        return
    if child is not None:
        processes.stop([child])  # what it started may live on, and hold its port
        del children[part.name]
        line = "".join(c for c in child.tail(1) if c.isprintable()).strip()
        trouble += f" ({child.log.name}: {line[:SAID_CHARACTERS]})" if line else ""
    now = time.monotonic()
    watch.down_since = watch.down_since if watch.serves_since is None else now
    pause = second * min(2.0 ** min(watch.attempts, 30), LONGEST)
    watch.attempts, watch.serves_since, watch.due = watch.attempts + 1, None, now + pause
    say(f"{part.name} {trouble}; next try in {pause:.0f} s")


def _is_ready(part: Part) -> bool:
    with suppress(Exception):  # whatever a client makes of what is half there, the rest stays
        return part.is_ready()
    return False
