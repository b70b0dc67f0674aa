from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from pipelines import machine


def hvd(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **environment},
    )


def test_help_teaches_every_command_and_what_to_try_first() -> None:
    whole, up = hvd("--help").stdout, hvd("up", "--help").stdout
    commands = "serve learn up demo doctor model train-drafter bootstrap drift bench policy"
    assert not [command for command in commands.split() if command not in whole]
    tries = ("request", "page", "topic", "rollback", "started again")
    assert not [what for what in tries if what not in up]


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
    done = hvd("doctor", "--json")
    checks = json.loads(done.stdout)
    assert {"name", "ok", "found", "fix", "blocks"} == set(checks[0])
    parts = {"python", "torch", "vllm", "processor", "broker", "registry", "model"}
    assert parts <= {c["name"] for c in checks}
    assert all(c["found"] and (c["ok"] or c["fix"]) for c in checks)
    assert done.returncode == (1 if any(c["blocks"] and not c["ok"] for c in checks) else 0)


def test_up_names_the_port_that_is_taken(tmp_path) -> None:
    home = tmp_path / "hybrid-verified-decoding" / "smollm2-135m-instruct"
    home.mkdir(parents=True)
    (home / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, free = str(server.getsockname()[1]), str(machine.free_port())
        done = hvd("up", "--kafka-port", port, "--page-port", free, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert f"port {port} is taken" in done.stderr


def test_a_shell_completes_commands_options_and_those_of_bench() -> None:
    def completed(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        return hvd(_HVD_COMPLETE="complete_bash", **words).stdout.split()

    assert completed("hvd le") == ["learn"]
    assert "--kafka-port" in completed("hvd up --")
    assert "serve" in completed("hvd bench s")
