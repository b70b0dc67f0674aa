from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

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


def test_help_teaches_every_command() -> None:
    done = hvd("--help")
    assert done.returncode == 0
    for command in (
        "serve",
        "learn",
        "up",
        "demo",
        "doctor",
        "model",
        "train-drafter",
        "bootstrap",
        "drift",
    ):
        assert command in done.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; import pipelines.cli; "
        "heavy = {'torch', 'transformers', 'vllm', 'mlflow', 'kafka', 'matplotlib'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_an_error_is_one_sentence_and_status_two() -> None:
    done = hvd("serve", "--model", "/no/such/model")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "ModelError: model /no/such/model: no such directory." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_setting_is_named() -> None:
    done = hvd("serve", "--model", "owner/model", HVD_KAFKA_BOOTSTRAP="127.0.0.1:1")
    assert done.returncode == 2
    assert "HVD_KAFKA_BOOTSTRAP_SERVERS" in done.stderr


def test_a_usage_error_is_told_apart_from_a_crash() -> None:
    done = hvd("serve", "--prot", "8000")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--port" in done.stderr


def test_the_doctor_speaks_json() -> None:
    done = hvd("doctor", "--json")
    checks = json.loads(done.stdout)
    assert {"name", "ok", "found", "fix", "blocks"} == set(checks[0])
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


def test_up_says_what_can_be_tried_first() -> None:
    done = hvd("up", "--help")
    assert done.returncode == 0
    for what in ("request", "page", "topic", "rollback", "started again"):
        assert what in done.stdout


def test_a_shell_completes_commands_options_and_those_of_bench() -> None:
    def completed(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        return hvd(_HVD_COMPLETE="complete_bash", **words).stdout.split()

    assert completed("hvd le") == ["learn"]
    assert "--kafka-port" in completed("hvd up --")
    assert "serve" in completed("hvd bench s")


def test_completion_installs_itself_in_the_shell_that_asks(tmp_path) -> None:
    command = f"{sys.executable} -m pipelines.cli --install-completion; exit $?"
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", command], check=False, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert "_HVD_COMPLETE" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()
