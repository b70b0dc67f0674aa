from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pipelines.cli import app


def hvd(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **environment},
    )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; import pipelines.cli; "
        "heavy = {'torch', 'transformers', 'vllm', 'mlflow', 'kafka', 'matplotlib'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (("--model", "/no/such"), {}, "ModelError: model /no/such is no checkpoint"),
        (("--model", "o/m"), {"HVD_WORKER_QUEUE_SIZ": "10"}, "HVD_WORKER_QUEUE_SIZE"),
        (("--prot", "8000"), {}, "--port"),
    ],
)
def test_an_error_is_one_sentence_and_status_two(arguments, environment, said) -> None:
    done = hvd("serve", *arguments, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and "Traceback" not in done.stderr


def test_the_doctor_speaks_json() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    checks = json.loads(done.stdout)
    assert {"name", "ok", "found", "fix", "blocks"} == set(checks[0])
    parts = {"torch", "vllm", "processor", "broker", "registry", "model"}
    assert parts <= {c["name"] for c in checks}
    assert all(c["found"] and (c["ok"] or c["fix"]) for c in checks)
    assert done.exit_code == (1 if any(c["blocks"] and not c["ok"] for c in checks) else 0)
