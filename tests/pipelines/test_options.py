"""Commands that take their options as one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from pipelines.options import options_of


@dataclass(frozen=True)
class Greeting:
    name: Annotated[str, typer.Argument(help="Whom.")]
    times: Annotated[int, typer.Option(min=1, help="How often.")] = 1
    loud: Annotated[bool, typer.Option("--loud", help="In capitals.")] = False


def test_a_records_fields_are_the_options_and_further_arguments_reach_the_command() -> None:
    app, seen = typer.Typer(), []

    @app.command(context_settings={"allow_extra_args": True})
    @options_of(Greeting)
    def greet(context: typer.Context, o: Greeting) -> None:
        """Say hello."""
        seen.append((context.args, o))

    run = CliRunner().invoke
    assert run(app, ["Ada", "--times", "2", "--loud", "--", "more"]).exit_code == 0
    assert run(app, ["Ada"]).exit_code == 0
    assert seen == [(["more"], Greeting("Ada", 2, True)), ([], Greeting("Ada"))]
    assert run(app, ["Ada", "--times", "0"]).exit_code == run(app, []).exit_code == 2
    help_text = run(app, ["--help"]).output
    assert all(text in help_text for text in ("Say hello.", "How often.", "Whom."))
