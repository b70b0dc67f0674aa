"""``hvd up``: starts the stack, and restarts its parts until Ctrl-C.

A part that ends is restarted after a growing pause. Nothing here waits for one part, so it cannot
delay the others. Existing supervisors need a configuration or daemon of their own, or end
everything with the first process that ends.
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
    """Start the stack and its page, and restart parts that end.

    Raises:
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; everything is stopped by then.
        BrokerError, ProcessError, ModelError, RegistryError: a part did not start.
    """
    from pipelines.watch.live import links_to, serving

    # checked before the other parts take a minute to start
    machine.check_free(page_port, "choose another with --page-port")
    with running(ports, home, console) as stack:
        logs = {name: part.log for name, part in stack.parts.items()}
        links = links_to(stack.api, stack.tracking_uri, logs)
        with serving(stack.kafka, page_port, links, logs, first_request(stack)) as page:
            console.print(greeting(stack, page, home), highlight=False, soft_wrap=True)
            keep_up(stack.parts, stack.children, lambda what: say(console, what))


def say(console: Console, what: str) -> None:
    """Print a message with the time of day; never raises."""
    line = f"{time.strftime('%H:%M:%S')} {escape(what)}"
    with suppress(Exception):  # a full disk or a closed pipe must not stop the stack
        console.print(line, highlight=False, soft_wrap=True)


def first_request(stack: Stack) -> str:
    """A curl command that sends a request."""
    messages = [{"role": "user", "content": "Name three rivers."}]
    body = {"model": stack.model, "messages": messages, "max_tokens": 64, "temperature": 0}
    url = f"{stack.api}/v1/chat/completions -H 'Content-Type: application/json'"
    if os.environ.get(KEY_VARIABLE):  # the worker inherits it
        url += f' -H "Authorization: Bearer ${KEY_VARIABLE}"'
    if any(name.lower().endswith("_proxy") for name in os.environ):
        url = f"--noproxy '*' {url}"
    return f"curl -s {url} -d {shlex.quote(json.dumps(body))}"


def greeting(stack: Stack, page: str, home: Home) -> str:
    """The addresses, and commands to try first, as rich markup."""
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

# the status of worker and learner, every second
{python} -m kafka.consumer -b {kafka} -t {STATUS.name}

# the policies; the first is registered after a hundred drafts
{hvd} policy list

Parts that end are restarted. Ctrl-C stops everything.
"""
    return re.sub("^# .*", r"[dim]\g<0>[/dim]", escape(text), flags=re.M)


LOG_CHARACTERS: Final = 160  # most characters shown of a log's last line


MAX_PAUSE: Final = 60.0
"""Longest pause before a restart. Pauses start at one and double; a part that has run for this long
starts over."""
POLL: Final = 0.2


@dataclass
class PartState:
    """The state of one part, in seconds of the monotonic clock.

    ``due`` is when a stopped part is restarted, or the deadline of one that starts.
    """

    part: Part
    attempts: int = 0
    down_since: float = field(default_factory=time.monotonic)
    serves_since: float | None = None
    due: float = 0.0


def keep_up(
    parts: Mapping[str, Part],
    children: dict[str, Child],
    say: Callable[[str], None],
    second: float = 1.0,
) -> NoReturn:
    """Restart any of ``parts`` that ends, until an interrupt is raised. Mutates ``children``.

    Args:
        second: unit of the pauses, in seconds.
    """
    now = time.monotonic()
    watches = [PartState(part, serves_since=now) for part in parts.values()]
    while True:
        for watch in watches:
            supervise(watch, children, say, second)
        time.sleep(POLL * second)


def supervise(
    watch: PartState, children: dict[str, Child], say: Callable[[str], None], second: float = 1.0
) -> None:
    """Do what one part needs now; it waits only for a child that is being stopped."""
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
        if now - watch.serves_since >= MAX_PAUSE * second:
            watch.attempts = 0
    elif _is_ready(part):
        watch.serves_since = time.monotonic()
        say(f"{part.name} runs again, {watch.serves_since - watch.down_since:.0f} s after it ended")
    elif now > watch.due:
        trouble = "was not ready in time"
    if not trouble:
        return
    if child is not None:
        processes.stop([child])  # its own children may live on and hold its port
        del children[part.name]
        line = "".join(c for c in child.tail(1) if c.isprintable()).strip()
        trouble += f" ({child.log.name}: {line[:LOG_CHARACTERS]})" if line else ""
    now = time.monotonic()
    watch.down_since = watch.down_since if watch.serves_since is None else now
    pause = second * min(2.0 ** min(watch.attempts, 30), MAX_PAUSE)
    watch.attempts, watch.serves_since, watch.due = watch.attempts + 1, None, now + pause
    say(f"{part.name} {trouble}; next try in {pause:.0f} s")


def _is_ready(part: Part) -> bool:
    with suppress(Exception):  # a half-started server must not stop the others
        return part.is_ready()
    return False
