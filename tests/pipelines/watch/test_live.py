"""The live page as a browser asks for it, with no broker to be found."""

from __future__ import annotations

import httpx
import pytest

from decoder.contracts.settings import KafkaSettings
from pipelines import machine
from pipelines.watch import live


@pytest.fixture
def address():
    nowhere = KafkaSettings(bootstrap_servers=f"127.0.0.1:{machine.free_port()}")
    with live.serving(nowhere, 0) as address:
        yield address


def test_the_page_and_its_figures_are_served(address: str) -> None:
    page = httpx.get(address)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert httpx.get(f"{address}/figures.json").json()["title"] == live.TITLE
    assert httpx.get(f"{address}/etc/passwd").status_code == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example:8000", 403),
        ("", 403),
    ],
)
def test_who_asks_by_a_strangers_name_is_refused(address: str, host: str, status: int) -> None:
    asked = httpx.get(f"{address}/figures.json", headers={"Host": host})
    assert asked.status_code == status


def test_figures_that_cannot_be_computed_are_said_in_a_sentence(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OverflowError("year out of range")

    with monkeypatch.context() as patched:
        patched.setattr(live, "record", broken)
        for path in ("/", "/figures.json"):
            answer = httpx.get(address + path)
            assert answer.status_code == 503
            assert answer.text == "The figures cannot be computed now: try again."
    assert len(caplog.records) == 1, "said once a minute"
    assert httpx.get(address).status_code == 200
