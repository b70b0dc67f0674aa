"""The page as a file and as it is served: what it holds, what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from decoder.contracts.bundle import CHAMPION, TRIAL
from decoder.contracts.errors import ProcessError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, STATUS, TRIALS
from decoder.policy.first import first_policy
from pipelines import machine
from pipelines.watch import ledger as ledger_module
from pipelines.watch.ledger import ARMS, Calibration, Ledger, Phase
from pipelines.watch.live import links_to, sentences, serving
from pipelines.watch.page import (
    ALL,
    as_dict,
    as_text,
    by_kind,
    rate_of,
    record,
    render,
    shares_of,
    uplifts,
)
from tests.conftest import until
from tests.decoder.telemetry.broker import running, send
from tests.events import encode_events
from tests.pipelines.watch import records
from tests.pipelines.watch.records import (
    EVENTS,
    ORIGIN,
    SCOPE,
    WORKER,
    batch,
    event,
    learner_status,
    rounds,
)

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
PATH = next((found for name in NAMES if (found := shutil.which(name))), None)

needs_browser = pytest.mark.skipif(PATH is None, reason="apt-get install chromium-headless-shell")


def opened(url: str, dark: bool = False, seconds: float = 10.0, width: int = 1280) -> str:
    """The document at ``url`` after ``seconds`` of its scripts, which the browser does not wait."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    options += [f"--window-size={width},1560"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [str(PATH), *options, f"--virtual-time-budget={round(1000 * seconds)}", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=True).stdout


def text_of(document: str, identifier: str) -> str:
    """Text of the element of that id, which holds no other."""
    (found,) = re.findall(rf'id="{identifier}"[^>]*>([^<]*)<', document)
    return str(found)


HOSTILE = '</script><img src=x onerror="document.title=1"><b id="run">{{ 1 }}'


def test_a_page_says_what_it_is_worth_what_is_in_force_what_was_learned_and_what_is_wrong() -> None:
    ledger = records.recorded(faults=3)
    said = {"rollout_said": "v2 is on trial", "drifts": 1, "last_drift_at": 1002.0}
    ledger.add_status(records.learner_status(1121.0, 10, **said))
    figures = record(ledger, "A run")
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    tiles = {tile["id"]: tile for tile in figures["tiles"]}
    assert list(tiles) == ["over_plain", "over_suffix", "over_first"]
    assert float(tiles["over_plain"]["value"]) == pytest.approx(1.5, rel=0.03)
    assert "60 pairs" in tiles["over_plain"]["detail"]
    charts = {chart["id"]: chart for chart in figures["charts"]}
    assert sum(max(d["y"], default=0) for d in charts["arms"]["data"]) == pytest.approx(100.0)
    band, line = charts["ratio"]["data"][1:3]
    assert len(band["y"]) > len(line["y"]) > 5
    marks = {mark["text"] for mark in charts["ratio"]["marks"]}
    assert marks == {"agentic", "conversation", "v1", "v2", "alarm"}
    tables = {table["title"]: table["rows"] for table in figures["tables"]}
    agentic, *_ = tables["Ratio of tokens a second to each alternative"]
    assert agentic[-3:-1] == ["stock suffix decoding", "plain decoding"]
    assert agentic[0] == "agentic" and float(agentic[-1]) == pytest.approx(60.0, rel=0.03)
    assert float(agentic[1].split()[0]) == pytest.approx(1.5, rel=0.03)
    calibration = tables["Calibration: accepted tokens of a cache draft"]
    assert calibration[0] == ["agentic", "v1", "240", "3.00", "5.00", "2.00"]
    assert calibration[1] == ["conversation", "v2", "240", "4.50", "5.00", "0.50"]
    versions = [row[1:] for row in tables["Policy versions"]]
    assert ["v2", "serving on the worker"] in versions
    assert ["", "v2 is on trial"] in versions


def told(ledger: Ledger) -> list[str]:
    return [str(one["text"]) for one in sentences(ledger, {})]


def test_four_sentences_say_what_a_running_service_comes_to() -> None:
    nothing = told(Ledger())
    assert "no comparison has ended" in nothing[0] and "No worker" in nothing[1]
    assert "No learner" in nothing[2] and "the worker has not reported;" in nothing[3]
    ledger, now = records.recorded(), time.time()
    said = {"candidates": 5, "promotions": 1, "rollout_said": "version 2: it was faster"}
    ledger.add_status(records.learner_status(now, EVENTS, **said))
    ledger.add_status(records.worker_status(now, 1, policy_version=2, publication=7))
    worth, force, learned, wrong = told(ledger)
    assert worth.startswith("It makes 1.") and worth.endswith("of plain decoding.")
    assert force == "Policy version 2, trained by the learner, decides."
    assert f"read {EVENTS} events, tested 5 candidates and promoted 1; version 2" in learned
    assert wrong == "Nothing is wrong."
    logs = ("worker", "learner", "registry")
    for uri, second, third in (
        ("http://m", "http://m/#/models", "http://m/#/experiments"),
        ("sqlite:///mlflow.db", "/log/learner", "/log/learner"),
    ):
        links = links_to("http://a", uri, logs)
        assert [one["href"] for one in sentences(ledger, links)] == [
            "http://a/metrics",
            second,
            third,
            "/log/worker",
        ]
    troubled = {"faults": 2, "events_dropped": 3, "drops": {"queue full": 3}, "fallback": "cache"}
    ledger.add_status(records.worker_status(now, 1, policy_version=2, **troubled))
    ledger.rounds = records.rounds(40, 1000.0, 2.0, {CHAMPION: 40.0, "plain": 40.0})
    worth, force, _, wrong = told(ledger)
    assert "whether it is faster takes about 1 minute more" in worth
    assert "version 2, trained by the learner, is loaded, but the fallback 'cache' decides" in force
    assert "2 faults" in wrong and "events of the worker are lost (3 queue full)" in wrong
    for role, named in (("first", "the policy that ships"), ("champion", "nothing learned")):
        ledger.statuses = [records.worker_status(now, 1, policy_role=role)]
        assert told(ledger)[1] == f"Policy v0, {named}, decides."
    ledger.add_status(records.worker_status(now, 1, policy_version=5))
    ledger.add_policy(now, SCOPE, CHAMPION, replace(first_policy(SCOPE), version=5))
    assert told(ledger)[1] == "Policy version 5, the policy that ships, decides."
    theirs = {**first_policy(SCOPE).provenance, "sets": []}  # by hvd bootstrap as well
    ledger.add_policy(
        now, SCOPE, CHAMPION, replace(first_policy(SCOPE), version=6, provenance=theirs)
    )
    ledger.add_status(records.worker_status(now, 1, policy_version=6))
    assert told(ledger)[1] == "Policy version 6 decides."
    away = records.learner_status(now, 10, registry_away_since=now)
    ledger.add_status(away)
    assert sentences(ledger, links)[3]["href"] == "/log/registry"
    ledger.rounds = ledger.rounds[:6]
    assert "about 1 minute more of such traffic" in told(ledger)[0]


@needs_browser
def test_a_browser_draws_the_page_without_a_network_and_runs_no_name(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    told = render(record(records.recorded(phase=HOSTILE), HOSTILE, [{"text": "It was faster."}]))
    file.write_text(told, encoding="utf-8")
    (figures,) = re.findall("^let figures = (.*);$", told, re.MULTILINE)
    assert json.loads(figures)["title"] == HOSTILE and len(told) > 3_000_000
    document = opened(file.as_uri(), dark=True)
    assert float(text_of(document, "over_plain")) == pytest.approx(1.5, rel=0.03)
    assert document.count("<svg") >= 4
    assert "It was faster." in document
    assert "rgb(228, 231, 234)" in document, "the ink on a dark page"
    assert "default-src 'none'" in document  # what the browser itself holds the page to
    assert '<b id="run"' not in document and "<img src" not in document
    assert "<title>&lt;/script&gt;" in document


TOUCHING = """
<script>setTimeout(() => {
  const names = [...document.querySelectorAll(".annotation-text")];
  const boxes = names.map(e => e.getBoundingClientRect());
  const beside = (a, b) => a.right <= b.left || b.right <= a.left;
  const touch = (a, b) => !beside(a, b) && a.top < b.bottom && b.top < a.bottom;
  const count = boxes.filter((a, i) => boxes.some((b, k) => k > i && touch(a, b))).length;
  document.title = `${boxes.length} names, ${count} touch, ${document.body.scrollWidth} wide`;
}, 3000)</script>"""


@needs_browser
@pytest.mark.parametrize("width", [1280, 500])  # a headless window is no narrower
def test_names_of_versions_and_phases_do_not_touch_however_fast_they_come(
    tmp_path: Path, width: int
) -> None:
    ledger = records.recorded(phase="a drafter that is broken")
    for second in range(61, 120, 2):
        status = records.worker_status(1000.0 + second, 1, policy_version=second)
        ledger.add_status(status.model_copy(update={"policy_applied_at": 1000 + second}))
    file = tmp_path / "report.html"
    file.write_text(render(record(ledger, "A run")) + TOUCHING)
    document = opened(file.as_uri(), width=width)
    found = re.search(r"(\d+) names, (\d+) touch, (\d+) wide", document)
    assert found and int(found[1]) > 8 and found[2] == "0" and int(found[3]) <= width, found


def test_one_stalled_block_stretches_no_axis_and_a_chart_without_anything_says_so() -> None:
    ledger = records.recorded()
    first = ledger.rounds[0]
    stalled = first.blocks[1].model_copy(update={"us": 1e9})
    ledger.rounds[0] = first.model_copy(update={"blocks": (first.blocks[0], stalled)})
    ratio, arms = record(ledger, "A run")["charts"]
    low, high = ratio["layout"]["yaxis"]["range"]
    assert ratio["layout"]["yaxis"]["type"] == "log" and -1.0 <= low < 0.0 < high <= 1.0
    assert not ratio["is_empty"] and not arms["is_empty"]
    empty = record(Ledger(), "A run", nothing="ask something")
    assert [chart["is_empty"] for chart in empty["charts"]] == [True, True]


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSettings]:
    with running(tmp_path_factory.mktemp("broker")) as reached:
        yield reached


def produce(kafka: KafkaSettings, began: float, rates: dict[str, float]) -> None:
    statuses = [records.worker_status(began + second, 60 * second) for second in range(31)]
    made = {TRIALS.name: records.rounds(30, began, 1.0, rates), STATUS.name: statuses}
    for topic, each in made.items():
        send(kafka, topic, *(one.model_dump_json().encode() for one in each), key=b"worker")


get = partial(httpx.get, timeout=300.0)


def detail(url: str) -> str:
    return str(get(f"{url}/figures.json").json()["tiles"][0]["detail"])


@needs_browser
def test_a_browser_reads_the_ratio_off_the_live_page_and_sees_it_change(kafka) -> None:
    began = time.time() - 120.0
    produce(kafka, began, records.FASTER)  # before the page is there: it reads what the topics hold
    with serving(kafka, 0) as url:
        until(lambda: "30 pairs" in detail(url))
        document = opened(url, seconds=1.0)
        ratio = float(text_of(document, "over_plain"))
        assert ratio == pytest.approx(1.5, rel=0.03)
        assert text_of(document, "over_plain-detail") == detail(url)
        assert text_of(document, "made").startswith("live")
        assert "Nothing yet: it takes requests" in document, "what no draft was seen of"
        assert "rgb(29, 33, 38)" in document, "the ink on a light page"
        produce(kafka, began + 60.0, {**records.FASTER, CHAMPION: 40.0})
        until(lambda: "60 pairs" in detail(url))
        assert float(text_of(opened(url, seconds=12.0), "over_plain")) < ratio - 0.1


def test_who_has_sent_requests_is_told_to_wait_and_not_to_send_one(kafka) -> None:
    made = encode_events([event(0, time.time())], ORIGIN, 0)
    with serving(kafka, 0, request="curl -s there") as url:
        until(  # drafts are read from the end on
            lambda: "need minutes of requests" in get(url).text,
            turn=lambda: send(kafka, DRAFTS.name, made, key=b"worker"),
        )
        assert "curl -s there" not in get(url).text


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    nowhere = KafkaSettings(bootstrap_servers=f"127.0.0.1:{machine.free_port()}")
    log = tmp_path / "worker.log"
    log.write_text("x" * 70_000 + "the last line")
    registry = "http://anna:hunter2@127.0.0.1:9"
    links = links_to("http://127.0.0.1:8", registry, ["worker"])
    with serving(nowhere, 0, links, {"worker": log}, "curl -s there") as address:
        yield address


def test_the_live_page_is_served_to_this_machine_while_no_broker_is_there(address: str) -> None:
    page = get(address)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert detail(address) == "not compared"
    assert "http://127.0.0.1:9" in page.text and "hunter2" not in page.text
    for path in ("/etc/passwd", "/log/learner", "/log/../worker.log"):
        assert get(f"{address}{path}").status_code == 404
    log = get(f"{address}/log/worker")
    assert log.headers["content-type"].startswith("text/plain")
    assert log.text.endswith("the last line") and len(log.text) == 1 << 16
    port = int(address.rsplit(":", 1)[1])
    taken = pytest.raises(ProcessError, match=f"port {port} is taken")
    with taken, serving(KafkaSettings(), port):
        pass
    for host, status in (("localhost", 200), ("localhost.evil.example:80", 403), ("", 403)):
        asked = get(f"{address}/figures.json", headers={"Host": host})
        assert asked.status_code == status, "a page of a stranger whose name leads here"


def test_arms_are_those_of_the_policy_in_force_whatever_other_sides_did() -> None:
    made = [
        event(0, 101.0, side="", arm="cache", accepted=5, verified_len=4),
        event(1, 101.0, side="champion", arm="model", model_accepted=2, censored="length"),
        event(2, 101.2, side="champion", arm="none", predicted=4.0, accepted=3),
        event(3, 101.4, arm="none", draft_len=0, accepted=0, label="", features=None),
        event(4, 101.5, side="plain", arm="none"),
        event(5, 101.5, side="trial", arm="cache", accepted=8, role="trial"),
        event(6, 105.0, side="", arm="model", model_accepted=1, accepted=3),
    ]
    found = Ledger(WORKER)
    found.add_drafts(batch(made))
    cycles = found.sums(100.0, 105.0)
    assert {arm: cycles[arm] for arm in ARMS} == {"cache": 1, "model": 1, "none": 2}
    assert shares_of(found.sums(105.0, 110.0)) == {"cache": 0.0, "model": 1.0, "none": 0.0}
    assert set(shares_of(found.sums(0.0, 9.0)).values()) == {0.0}
    label = {1: Calibration(2, 3.5, 4.0, 1.5)}
    assert found.calibration(100.0, 105.0) == label, "labelled to the end, and its own"
    assert not found.calibration(106.0, 110.0)
    assert found.seen == 7


def test_events_count_once_and_only_those_of_the_own_worker_and_scope() -> None:
    found = Ledger(WORKER)
    found.add_drafts(batch([event(0, 101.0), event(0, 101.0)]))
    found.add_drafts(batch([event(0, 101.0)]))
    found.add_drafts(batch([event(1, 101.0)], replace(ORIGIN, worker="another")))
    found.add_drafts(batch([event(0, 102.0)], replace(ORIGIN, life="2e" * 8)))
    assert found.seen == found.sums(0.0, 200.0)["cache"] == 2
    found.add_status(records.worker_status(101.0, 0))
    found.add_status(learner_status(101.0, 5))
    found.add_status(learner_status(102.0, 99).model_copy(update={"scope": "other"}))
    assert (found.consumed, found.learner[-1].scope) == (5, SCOPE)


def test_what_is_older_than_is_kept_is_forgotten_and_a_time_to_come_deletes_no_history() -> None:
    found = Ledger(keep_s=60.0)
    for second in range(200):
        found.add_status(records.worker_status(float(second), second))
    for one in records.rounds(40, 0.0, 5.0, {"champion": 40.0}):
        found.add_round(one)
    assert (found.statuses[0].time, found.rounds[0].time) == (139.0, 140.0)
    now = time.time()
    for at in (now - 5.0, now, now + 3600.0, 1.0, now):
        found.add_status(records.worker_status(at, 1))
    assert [s.time for s in found.statuses] == [now - 5.0, now, now]


def test_made_up_lives_times_and_publications_do_not_grow_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, now = Ledger(keep_s=3.0), time.time()
    monkeypatch.setattr(ledger_module, "KEPT_NUMBERS", 3)
    monkeypatch.setattr(ledger_module, "KEPT_PUBLICATIONS", 3)
    for life in range(10):
        made = event(life, now + 60.0 * life)
        found.add_drafts(batch([made, made], replace(ORIGIN, life=f"{life:x}")))
        found.add_policy(1e15, SCOPE, TRIAL, None)
    assert found.seen == 10
    assert len(found._numbers) == len(found._published) == 3
    assert len(found._seconds) <= 7
    assert found._published[-1].time <= time.time()


RATES = {"champion": 60.0, "plain": 40.0, "suffix": 50.0}
PHASES = [Phase("A", ("edits",), "A", 100.0, 200.0), Phase("B", ("chat",), "B", 200.0)]


def played() -> list:
    return [*rounds(40, 100.0, 2.0, RATES), *rounds(20, 200.0, 2.0, {**RATES, "champion": 30.0})]


def test_each_phase_has_its_own_ratio_and_the_whole_is_that_of_all() -> None:
    found = uplifts(played(), PHASES)
    first, second, whole = (found[name]["plain"] for name in ("A", "B", ALL))
    assert (first.ratio, second.ratio) == pytest.approx((1.5, 0.75), rel=0.05)
    assert (first.pairs, second.pairs, whole.pairs) == (40, 20, 60)
    assert whole.low < whole.ratio < whole.high
    assert found["A"]["suffix"].ratio == pytest.approx(1.2, rel=0.05)
    rates = [rate_of(part) for part in by_kind(played(), PHASES).values()]
    assert rates == pytest.approx([60.0, 30.0, 50.0], rel=0.05) and rate_of([]) == 0.0


def test_no_interval_is_claimed_before_there_is_one_and_no_side_that_never_played() -> None:
    assert list(uplifts(rounds(5, 0.0, 2.0, RATES), ())[ALL]) == ["plain", "suffix"]
    none, few, many = (uplifts(rounds(n, 0.0, 1.0, RATES), ())[ALL]["plain"] for n in (0, 5, 50))
    assert as_text(none) == "-" and as_text(few).startswith("about 1.") and " to " in as_text(many)
    assert as_dict(none) == {"ratio": None, "low": None, "high": None, "pairs": 0}
    assert as_dict(few) == {**as_dict(none), "ratio": round(few.ratio, 4), "pairs": 5}
