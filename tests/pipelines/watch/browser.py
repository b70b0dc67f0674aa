"""A headless Chromium, where the machine has one, and what it makes of a page."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
PATH = next((found for name in NAMES if (found := shutil.which(name))), None)

needs_browser = pytest.mark.skipif(
    PATH is None, reason="no Chromium: apt-get install chromium-headless-shell"
)


def opened(url: str, dark: bool = False, seconds: float = 10.0) -> str:
    """The document at ``url`` as it stands after its scripts had ``seconds``, which the browser
    does not really wait."""
    assert PATH is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    if dark:
        options.append("--blink-settings=preferredColorScheme=0")
    budget = f"--virtual-time-budget={round(1000 * seconds)}"
    done = subprocess.run(
        [PATH, *options, budget, url], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def text_of(document: str, identifier: str) -> str:
    """Text of the element of that id, which holds no other."""
    found = re.search(rf'id="{identifier}"[^>]*>([^<]*)<', document)
    assert found, f"no {identifier} in the page"
    return found.group(1)
