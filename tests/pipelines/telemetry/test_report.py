"""The answers over an export are those of a plain loop over the same events, and a browser shows
them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from decoder.contracts.errors import TraceError
from decoder.contracts.events import DraftEvent, encode_batch
from decoder.contracts.features import FEATURES
from decoder.contracts.settings import KafkaSettings
from pipelines.cli import app
from pipelines.telemetry.asked import Answer, answers
from pipelines.telemetry.export import export
from pipelines.telemetry.report import record, report
from tests.pipelines.telemetry.records import ONE, produce, spread
from tests.pipelines.watch.browser import needs_browser, opened, text_of
from tests.pipelines.watch.records import event

PLAIN_US, TOKEN_US, DRAFTER_US = 20_000.0, 500.0, 9_000.0
COUNT = 1_200


def step_us(batch: int, tokens: int, arm: str) -> float:
    return PLAIN_US + TOKEN_US * tokens + (DRAFTER_US if arm == "model" else 0.0)


def made(number: int, rng: random.Random) -> DraftEvent:
    """Long drafts in edits, short ones in chat, whose accepted length rises halfway; whichever arm,
    by lot; some requests end before the label is known, and some steps are a trial's."""
    edits, arm = rng.random() < 0.5, rng.choice(["cache", "model", "none"])
    late = number > COUNT // 2
    accepted = rng.randint(4, 8) if edits else rng.randint(0, 2) + 3 * late
    batch = rng.choice([1, 2, 8])
    ran = {"cache": rng.choice([4, 8]), "model": 3, "none": 0}[arm]
    tokens = batch + ran
    features = event(0, 0.0).features
    assert features is not None
    features[FEATURES.index("match_len")] = 12.0 if edits else 3.0
    return event(
        number, 1e9 + number, accepted=accepted, draft_len=8, verified_len=ran, arm=arm,
        batch_size=batch, step_tokens=tokens, step_us=step_us(batch, tokens, arm),
        workload="edits" if edits else "chat", predicted=6.0 if edits else 1.0,
        predicted_model=2.0, model_accepted=rng.randint(0, 3) if arm == "model" else None,
        censored="abort" if number % 50 == 0 else "", side="plain" if number % 40 == 1 else "",
        features=features,
    )  # fmt: skip


EVENTS = [made(number, random.Random(number)) for number in range(COUNT)]


@pytest.fixture(scope="module")
def folder(empty: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spread(empty, 1)
    cuts = range(0, COUNT, 100)
    produce(empty, [(0, encode_batch(EVENTS[c : c + 100], ONE, c // 100)) for c in cuts])
    path = tmp_path_factory.mktemp("export") / "events"
    export(empty, path, lambda what, done, whole: None)
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Answer]:
    return answers(folder)


def plain_us(batch: int) -> float:
    return (PLAIN_US + TOKEN_US * batch) / batch


def test_where_the_cache_pays_is_what_a_loop_says(found: dict[str, Answer]) -> None:
    for kind in ("edits", "chat"):
        mine = [e for e in EVENTS if e.workload == kind and not e.censored]
        tokens = sum(1 + e.accepted for e in mine)
        times = sum(1 + 8 * TOKEN_US / plain_us(e.batch_size) for e in mine)
        rows = found["pays"].only(what="workload", value=kind)
        assert rows.column("drafts") == [len(mine)]
        assert rows.column("cache_pays")[0] == pytest.approx(tokens / times, rel=1e-6)
    matched = found["pays"].only(what="match, up to")
    assert matched.column("value") == ["4", "16"]


def test_regret_is_what_a_loop_says(found: dict[str, Answer]) -> None:
    own = [e for e in EVENTS if not e.side]

    def committed(e: DraftEvent) -> int:
        taken = min(e.accepted, e.verified_len) if e.arm == "cache" else e.model_accepted or 0
        return 1 + (taken if e.arm != "none" else 0)

    worth = sum(e.step_us / e.batch_size for e in own) / sum(map(committed, own))
    regrets: dict[str, list[float]] = {}
    for e in (e for e in own if not e.censored):
        plain = plain_us(e.batch_size)
        shares = sorted(x.step_us / x.batch_size for x in EVENTS
                        if x.batch_size == e.batch_size and x.arm == "model")  # fmt: skip
        model = (shares[len(shares) // 2] + shares[(len(shares) - 1) // 2]) / 2
        brings = [worth - plain, (1 + e.accepted) * worth - plain - e.accepted * TOKEN_US]
        chosen = brings[0]
        if e.arm == "cache":
            chosen = committed(e) * worth - plain - e.verified_len * TOKEN_US
        if e.model_accepted is not None:
            chosen = (1 + e.model_accepted) * worth - model
            brings.append(chosen)
        regrets.setdefault(e.arm, []).append(max(brings) - chosen)
    for arm, each in regrets.items():
        row = found["regret"].only(chosen=arm)
        assert row.column("cycles") == [len(each)]
        assert row.column("regret_us")[0] == pytest.approx(sum(each) / len(each), rel=1e-6)
    assert min(min(each) for each in regrets.values()) >= 0.0


def test_a_workload_that_drifts_is_seen_and_one_that_does_not_is_not(
    found: dict[str, Answer],
) -> None:
    apart = dict(zip(*(found["drift"].column(n) for n in ("workload", "standard_errors")),
                     strict=True))  # fmt: skip
    assert apart["chat"] > 10 and abs(apart["edits"]) < 3
    course = found["course"].only(workload="chat").column("accepted")
    assert len(course) == 40 and course[-1] - course[0] > 2


def test_tenths_and_costs_are_of_the_events(found: dict[str, Answer]) -> None:
    cache = found["calibration"].only(arm="cache")
    assert len(cache.rows) == 10 and cache.column("expected")[0] == 1.0
    assert sum(found["calibration"].only(arm="model").column("drafts")) == sum(
        e.arm == "model" and not e.censored and not e.side for e in EVENTS
    )
    batch = found["batch"].only(batch=8, arm="none")
    assert batch.column("step_ms") == [step_us(8, 8, "none") / 1e3]


@needs_browser
def test_a_browser_reads_the_regret_off_the_page(
    folder: Path, found: dict[str, Answer], tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["telemetry", "report", str(folder), "--out", str(file)])
    assert done.exit_code == 0, done.output
    document = opened(file.as_uri())
    share = found["regret"].only(chosen="all").column("share_of_time")[0]
    assert text_of(document, "regret") == f"{share:.1%}"
    assert float(text_of(document, "calibration_cache")) > 0
    assert document.count("<svg") >= 5 and "Where does cache drafting pay?" in document
    assert "CREATE OR REPLACE VIEW costs AS" in document  # to be copied


def test_an_event_without_a_draft_is_a_page(empty: KafkaSettings, tmp_path: Path) -> None:
    spread(empty, 1)
    none = {"draft_len": 0, "features": None, "label": "", "accepted": 0, "verified_len": 0}
    produce(empty, [(0, encode_batch([event(0, 1e9, arm="none", **none)], ONE, 0))])
    export(empty, tmp_path / "events", lambda what, done, whole: None)
    assert "Draft events of events" in report(tmp_path / "events")


@needs_browser
def test_a_name_of_a_hostile_worker_is_shown_and_not_run(
    empty: KafkaSettings, tmp_path: Path
) -> None:
    spread(empty, 1)
    value = encode_batch(EVENTS[:100], ONE, 0)
    name = '</script><img src=x onerror="document.title=1"><b id=run>'
    produce(empty, [(0, value.replace(b'"edits"', json.dumps(name).encode()))])
    export(empty, tmp_path / "events", lambda what, done, whole: None)
    file = tmp_path / "page.html"
    file.write_text(report(tmp_path / "events"), encoding="utf-8")
    document = opened(file.as_uri())
    assert "<title>Draft events of events</title>" in document
    assert "<b id=" not in document and "<img src" not in document
    assert "&lt;/script&gt;&lt;img" in document


def test_what_is_no_export_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="make one with hvd telemetry export"):
        report(tmp_path)
    (tmp_path / "export.json").write_text('{"files": []}')
    with pytest.raises(TraceError, match="is empty"):
        report(tmp_path)
    (tmp_path / "export.json").write_text('{"files": ["a.parquet"]}')
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(TraceError, match="cannot be asked"):
        report(tmp_path)


def test_a_page_over_shed_load_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert record(folder)["sentences"] == []
    asked = {**answers(folder), "shed": Answer(["least", "without"], [(0.25, 0)])}
    monkeypatch.setattr("pipelines.telemetry.report.answers", lambda folder: asked)
    (said,) = record(folder)["sentences"]
    assert "only one in 4.0 was told of" in said


@pytest.mark.parametrize("older", [600, COUNT])
def test_an_export_of_before_there_was_a_share_is_read_and_that_is_said(
    folder: Path, found: dict[str, Answer], tmp_path: Path, older: int
) -> None:
    """Also one that went on after the column came."""
    whole = pq.read_table(sorted(folder.glob("*.parquet")))
    pq.write_table(whole[:older].drop(["share"]), tmp_path / "a.parquet")
    pq.write_table(whole[older:], tmp_path / "b.parquet")
    names = ["a.parquet", "b.parquet"] if older < COUNT else ["a.parquet"]
    (tmp_path / "export.json").write_text(json.dumps({"files": names}))
    now = answers(tmp_path)
    for asked, column in (("regret", "regret_us"), ("pays", "cache_pays")):
        expected = found[asked].column(column)
        assert now[asked].column(column) == pytest.approx(expected, rel=1e-6), asked
    (said,) = record(tmp_path)["sentences"]
    assert f"{older} rows are of an older export" in said
