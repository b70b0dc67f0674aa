"""Whether a drafter fits a target: asked of their config files, before anything is loaded.

vLLM finds a misfit half a minute into start-up, as a shape error deep inside a layer.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from decoder.contracts.errors import ModelError


def read_config(model: str, what: str) -> dict[str, Any] | None:
    """``config.json`` of a local checkpoint directory; None for the name of a hub repository.

    Raises:
        ModelError: ``model`` is neither such a name nor a checkpoint directory.
    """
    path = Path(model).expanduser()
    if not path.exists() and re.fullmatch(r"[^/.~][^/]*/[^/]+", model):
        return None
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{what} {model} is no checkpoint whose config.json can be read ({error}): give a "
            "checkpoint directory, or a hub name such as owner/name."
        ) from error
    return config


def check_fit(target: dict[str, Any], drafter: dict[str, Any], names: tuple[str, str]) -> None:
    """Compare the numbers that an EAGLE3 head shares with its target; ``names`` are theirs.

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
    shared = {"hidden_size": drafter.get("target_hidden_size") or head.get("hidden_size")}
    for key, got in (shared | {"vocab_size": head.get("vocab_size")}).items():
        if None not in (wanted := numbers.get(key), got) and wanted != got:
            raise ModelError(
                f"drafter {names[1]} does not fit {names[0]}: its {key} is {got}, the target's is "
                f"{wanted}. Use a drafter made for this target, or --drafter none."
            )
