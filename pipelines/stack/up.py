"""``hvd up``: the stack, kept up until Ctrl-C, and what to try on it first."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from decoder.contracts.redacted import for_anybody
from decoder.contracts.topics import STATUS
from pipelines import machine
from pipelines.stack.running import Home, Ports, Stack, running
from pipelines.stack.supervision import keep
from pipelines.watch.live import serving


def up(ports: Ports, page_port: int, home: Home, console: Console) -> NoReturn:
    """Start the stack and its page, and start again whatever ends; leave by an interrupt.

    Raises:
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; everything is stopped by then.
        BrokerError, ProcessError, ModelError, RegistryError: a part did not come up at first.
    """
    # known before a minute has gone into the rest
    machine.check_free(page_port, "choose another with --page-port")
    with (
        running(ports, home, console) as stack,
        serving(stack.kafka, page_port, stack.tracking_uri) as page,
    ):
        console.print(greeting(stack, page, home), highlight=False, soft_wrap=True)
        keep(stack.parts, stack.children, lambda what: say(console, what))


def say(console: Console, what: str) -> None:
    """Print ``what`` with the time of day; never raises."""
    line = f"{time.strftime('%H:%M:%S')} {escape(what)}"
    with suppress(Exception):  # a full disk, a pipe that nobody reads: what is served goes on
        console.print(line, highlight=False, soft_wrap=True)


def greeting(stack: Stack, page: str, home: Home) -> str:
    """Where everything is, and a command for each thing worth trying first, as rich markup."""
    kafka = stack.kafka.bootstrap_servers
    messages = [{"role": "user", "content": "Name three rivers."}]
    asked = {"model": stack.model, "messages": messages, "max_tokens": 64, "temperature": 0}
    request = f"{stack.api}/v1/chat/completions -H 'Content-Type: application/json'"
    programs = Path(os.path.relpath(Path(sys.executable).parent))  # .venv/bin, in a checkout
    text = f"""
API     {stack.api}/v1
Page    {page}
MLflow  {for_anybody(stack.tracking_uri)}
Kafka   {kafka}
Logs    {home.root / "logs"}

# a request
curl -s {request} -d '{json.dumps(asked)}'

# what worker and learner say, once a second
{programs / "python"} -m kafka.consumer -b {kafka} -t {STATUS.name}

# the policy before this one
{programs / "hvd"} policy rollback

What ends is started again. Ctrl-C stops everything.
"""
    return re.sub("^# .*", r"[dim]\g<0>[/dim]", escape(text), flags=re.M)
