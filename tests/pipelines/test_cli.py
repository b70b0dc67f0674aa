from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line, "bash", sys.executable, "-m", "pipelines.cli"],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "NO_COLOR": "1", **environment},
    )


@pytest.mark.parametrize("command", ["--help", "--version", "policy list --help"])
def test_output_that_cannot_be_written_is_one_sentence_and_status_two(command: str) -> None:
    done = shell(f'"$@" {command} >/dev/full')
    said = "The output cannot be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ('set -o pipefail; "$@" {} | true', (0, 1)),  # by who is quicker
        ('"$@" {} >&-', (0,)),
        ('"$@" {} <&-', (0,)),
        ('"$@" {} >&- 2>&-', (0,)),
        ('"$@" {} 2>/dev/full', (0,)),
    ],
)
def test_a_stream_that_is_closed_is_no_traceback(line: str, status: tuple[int, ...]) -> None:
    done = shell(line.format("--help"))
    assert done.returncode in status and not done.stderr


def test_what_is_opened_does_not_take_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """What a library prints, or a child, would be written into it."""
    script = (
        "import sys; from pipelines.cli import open_streams; open_streams(); "
        "file = open(sys.argv[-1], 'w'); print('printed'); sys.stdout.flush(); "
        "import subprocess; subprocess.run(['echo', 'of a child'])"
    )
    done = shell(f'"$1" -c "{script}" "{tmp_path / "file"}" <&- >&- 2>&-')
    assert not done.returncode and (tmp_path / "file").read_text() == ""


def test_letters_that_a_terminal_lacks_are_no_error(tmp_path: Path) -> None:
    poor = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    done = shell('"$@" serve --model /n/ü', **poor)
    assert done.returncode == 2 and "is no checkpoint" in done.stderr
    assert shell('"$@" --help', **poor).returncode == 0


def test_the_doctor_speaks_json() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    checks = json.loads(done.stdout)
    assert {"name", "ok", "found", "fix", "blocks"} == set(checks[0])
    parts = {"torch", "vllm", "processor", "broker", "registry", "model"}
    assert parts <= {c["name"] for c in checks}
    assert all(c["found"] and (c["ok"] or c["fix"]) for c in checks)
    assert done.exit_code == (1 if any(c["blocks"] and not c["ok"] for c in checks) else 0)
