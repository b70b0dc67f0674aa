"""``python -m pipelines.lab.bench.gpu``: the benchmark where typer is not installed."""

import sys

from pipelines.lab.bench.gpu.run import main

sys.exit(main())
