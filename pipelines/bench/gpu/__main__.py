"""``python -m pipelines.bench.gpu``: the benchmark where typer is not installed."""

import sys

from pipelines.bench.gpu.run import main

sys.exit(main())
