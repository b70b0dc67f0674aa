"""Options that several commands share, and commands that take their options as one record."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import typer

Model = Annotated[
    str | None, typer.Option(help="Checkpoint directory or hub name; default: embedded.")
]
Tokenizer = Model
Drafter = Annotated[str | None, typer.Option(help="EAGLE3 head made for the model, or 'none'.")]
DType = Annotated[str, typer.Option(help="auto chooses what is fastest here.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


def options_of(record: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a typer command whose last parameter is a ``record``, a dataclass with typer's
    annotations. Its fields become the command's options."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [*inspect.signature(command, eval_str=True).parameters.values()][:-1]
        hints = get_type_hints(record, include_extras=True)
        names = [field.name for field in fields(record)]
        options = [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[field.name],
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
            ) for field in fields(record)
        ]  # fmt: skip

        def taking_options(**given: Any) -> None:
            values = {name: given.pop(name) for name in names}
            command(*given.values(), record(**values))

        taking_options.__name__, taking_options.__doc__ = command.__name__, command.__doc__
        taking_options.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        taking_options.__annotations__ = {p.name: p.annotation for p in (*own, *options)}
        return taking_options

    return decorate
