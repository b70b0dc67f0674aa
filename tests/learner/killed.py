"""A learner that saves often, as a process of its own: what the test of kills kills."""

from __future__ import annotations

import sys

from learner import loop
from learner.__main__ import main

loop.CHECKPOINT_SECONDS = 0.2  # type: ignore[misc]
sys.exit(main())
