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
        ModelError: ``model`` is neither such a name nor a checkpoint directory.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        if model.count("/") == 1 and not model.startswith(("/", ".", "~")) and not path.exists():
            return None
        raise ModelError(
            f"{what} {model}: no such directory. Give a checkpoint directory, or a hub name such "
            "as owner/name."
        )
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except FileNotFoundError as error:
        raise ModelError(f"{what} {model} holds no config.json: is it a checkpoint?") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{what}'s {file} cannot be read: {error}.") from error
    return config


def check_fit(target: dict[str, Any], drafter: dict[str, Any], names: tuple[str, str]) -> None:
    """Compare the numbers that an EAGLE3 head shares with its target.

    Args:
        names: how to call target and drafter in a message.

    Raises:
        ModelError: the drafter is no EAGLE3 head, or was made for another hidden size or
            vocabulary.
    """
    kinds = ", ".join(str(kind) for kind in drafter.get("architectures") or ())
    if "eagle3" not in kinds.lower():
        raise ModelError(
            f"drafter {names[1]} is {kinds or 'of no known architecture'}, not an EAGLE3 head: "
            "give an EAGLE3 checkpoint, or --drafter none."
        )
    # multimodal models nest the numbers of their language model
    numbers = target.get("text_config") or target
    head = drafter.get("transformer_layer_config") or drafter
    head = head.get("text_config") or head
    # the head may be narrower than its target if it says which width it reads
    read = drafter.get("target_hidden_size") or head.get("hidden_size")
    for what, wanted, got in (
        ("hidden size", numbers.get("hidden_size"), read),
        ("vocabulary", numbers.get("vocab_size"), head.get("vocab_size")),
    ):
        if wanted is not None and got is not None and wanted != got:
            raise ModelError(
                f"drafter {names[1]} does not fit {names[0]}: its {what} is {got}, the target's is "
                f"{wanted}. Use a drafter made for this target, or --drafter none."
            )
