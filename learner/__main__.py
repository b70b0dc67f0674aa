"""``python -m learner``: run the learner until SIGINT or SIGTERM."""

from __future__ import annotations

import sys

from learner.loop import run
from learner.process import until_told


def main() -> int:
    """Exit status of :func:`learner.process.until_told`."""
    return until_told(run)


if __name__ == "__main__":
    sys.exit(main())
