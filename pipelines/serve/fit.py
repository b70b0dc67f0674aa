"""Whether a drafter fits a target: asked of their config files, before anything is loaded.

vLLM finds a misfit half a minute into start-up, as a shape error deep inside a layer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from decoder.contracts.errors import ModelError


def read_config(model: str, what: str) -> dict[str, Any] | None:
    """``config.json`` of a local checkpoint directory; None for the name of a hub repository.

    Raises:
        ModelError: ``model`` looks like a path and is no checkpoint directory.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        if path.exists() or path.is_absolute() or model.startswith((".", "~")):
            raise ModelError(f"{what} {model}: no such directory. Give a checkpoint directory.")
        if model.count("/") != 1:  # hub names are owner/name
            raise ModelError(
                f"{what} {model!r} is neither a directory nor a hub name such as owner/name."
            )
        return None
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{what} {model} holds no config.json: is it a checkpoint?") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{what}'s {file} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{what}'s {file} is not a JSON object.")
    return config


def _target_numbers(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config") or config  # multimodal targets nest their language model


def check_fit(target: dict[str, Any], drafter: dict[str, Any], names: tuple[str, str]) -> None:
    """Compare the numbers that an EAGLE3 head shares with its target.

    Args:
        names: how to call target and drafter in a message.

    Raises:
        ModelError: the drafter is no EAGLE3 head, or was made for another hidden size or
            vocabulary.
    """
    target_name, drafter_name = names
    architectures = [str(a) for a in drafter.get("architectures") or ()]
    if not any("eagle3" in a.lower() for a in architectures):
        raise ModelError(
            f"drafter {drafter_name} is {', '.join(architectures) or 'of no known architecture'}, "
            "not an EAGLE3 head: give an EAGLE3 checkpoint, or --drafter none."
        )
    numbers = _target_numbers(target)
    # the head may be narrower than its target if it says which width it reads
    head = _target_numbers(drafter.get("transformer_layer_config") or drafter)
    read = drafter.get("target_hidden_size") or head.get("hidden_size")
    for what, wanted, got in (
        ("hidden size", numbers.get("hidden_size"), read),
        ("vocabulary", numbers.get("vocab_size"), head.get("vocab_size")),
    ):
        if wanted is not None and got is not None and wanted != got:
            raise ModelError(
                f"drafter {drafter_name} does not fit {target_name}: its {what} is {got}, the "
                f"target's is {wanted}. Use a drafter made for this target, or --drafter none."
            )
