"""What a command prints for other programs to read."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_json(value: Any) -> None:
    """``value`` as JSON on standard output."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
