"""Another version's Python of vLLM over the compiled parts of the one that is installed.

For tests alone, and only of what such a mixture can show: what our code and theirs say to each
other. The index has no CPU build of every version, and a CUDA build does not load here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from decoder.engines.vllm import contract
from pipelines.machine import cache_directory

LARGEST = 5_000_000
"""Bytes of a file of the package; what is larger is compiled."""


def mixture(number: str) -> Path:
    """A folder for the head of PYTHONPATH; made once, from the package index pip is set up for."""
    folder = cache_directory() / f"vllm-{number}-over-{contract.installed()[0]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name, "made")
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name]
        platform = ["--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64"]
        if subprocess.run([*fetch, *platform, f"vllm=={number}"], check=False).returncode:
            pytest.skip(f"the package index cannot be asked for vllm {number}")
        (wheel,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                if not entry.filename.endswith(".so") and entry.file_size < LARGEST:
                    archive.extract(entry, made)
        sources = contract.installed()[1]
        for library in (sources / "vllm").rglob("*.so"):
            there = made / library.relative_to(sources)
            there.parent.mkdir(parents=True, exist_ok=True)
            there.symlink_to(library)
        shutil.move(made, folder)
    return folder


def environment(number: str) -> dict[str, str]:
    """Variables under which Python finds that version."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(mixture(number)), str(root)))
    return {**os.environ, "PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu"}
