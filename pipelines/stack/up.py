"""``hvd up``: the stack, kept up until Ctrl-C, and what to try on it first."""

from __future__ import annotations

import json
import time
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from decoder.contracts.topics import STATUS
from pipelines.stack.running import Home, Ports, Stack, running
from pipelines.stack.supervision import keep


def up(ports: Ports, home: Home, console: Console, serve_options: tuple[str, ...] = ()) -> NoReturn:
    """Start the stack and start again whatever ends; leave by an interrupt.

    Args:
        serve_options: further arguments of ``hvd serve``.

    Raises:
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; everything is stopped by then.
        BrokerError, ProcessError, ModelError, RegistryError: a part did not come up at first.
    """

    def say(what: str) -> None:
        now = time.strftime("%H:%M:%S")
        console.print(f"{now} {escape(what)}", highlight=False, soft_wrap=True)

    with running(ports, home, console) as stack:
        console.print(greeting(stack, home), highlight=False, soft_wrap=True)
        keep(stack.parts, stack.children, say)


def greeting(stack: Stack, home: Home) -> str:
    """Where everything is, and a command for each thing worth trying first, as rich markup."""
    request = {
        "model": stack.model,
        "messages": [{"role": "user", "content": "Name three rivers."}],
        "max_tokens": 64,
        "temperature": 0,
    }
    places = {
        "API": f"{stack.api}/v1",
        "MLflow": stack.tracking_uri,
        "Kafka": stack.kafka.bootstrap_servers,
        "Logs": str(home.logs),
    }
    commands = {
        "a request": f"curl -s {stack.api}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{json.dumps(request)}'",
        "what worker and learner say, once a second": (
            f"python -m kafka.consumer -b {stack.kafka.bootstrap_servers} -t {STATUS.name}"
        ),
        "the policy before this one": "hvd policy rollback",
    }
    lines = [f"{name:<8}{escape(place)}" for name, place in places.items()]
    for what, command in commands.items():
        lines += ["", f"[dim]# {what}[/dim]", escape(command)]
    return "\n".join(["", *lines, "", "What ends is started again. Ctrl-C stops everything.", ""])
