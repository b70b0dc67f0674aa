"""What is wrong with a server's answers: one sentence for each fault, so that one run shows all."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from decoder.telemetry.metrics import EVERY_S
from tests.matrix.asks import SCHEMA, Ask
from tests.matrix.drive import Choice, Reply
from tests.server import Server, metric

CLOSE: Final = 1e-3
"""Of log probabilities: engines that verify in batches of other shapes add up in another order."""
RAISED: Final = re.compile(r"(?:^|\] )[\w.]*(?:Error|Exception)\b")
"""The line of a traceback that names the exception, behind vLLM's own prefix or without one."""


def of_replies(
    asks: list[Ask], got: Mapping[str, Reply], expected: Mapping[str, Reply]
) -> Iterator[str]:
    """Replies held to what plain vLLM answered, and to what was asked."""
    for ask in asks:
        mine, plain = got[ask.name], expected[ask.name]
        if mine.status != plain.status:
            yield f"{ask.name}: status {mine.status} instead of {plain.status}: {mine.error}"
        elif ask.exact:
            yield from (f"{ask.name}: {what}" for what in _differences(mine, plain))
        yield from (f"{ask.name}: {what}" for what in _broken_promises(ask, mine))


def _differences(mine: Reply, plain: Reply) -> Iterator[str]:
    if len(mine.choices) != len(plain.choices):
        yield f"{len(mine.choices)} answers instead of {len(plain.choices)}"
        return
    for a, b in zip(mine.choices, plain.choices, strict=True):
        if a.tokens != b.tokens:
            pairs = zip(a.tokens, b.tokens, strict=False)
            same = next((i for i, (x, y) in enumerate(pairs) if x != y), "all shared")
            yield f"tokens differ from {same} on: {a.tokens} instead of {b.tokens}"
        elif (a.finish, a.text, a.calls) != (b.finish, b.text, b.calls):
            yield f"{a.finish, a.text, a.calls} instead of {b.finish, b.text, b.calls}"
        elif not _close(a.logprobs, b.logprobs):
            yield "log probabilities differ"


def _close(a: Any, b: Any) -> bool:
    """Whether two records say the same, numbers within :data:`CLOSE`, candidates in any order."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= CLOSE
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_close(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    return bool(a == b)


def _broken_promises(ask: Ask, reply: Reply) -> Iterator[str]:
    """What the request asked for and did not get, whatever the tokens are."""
    if not reply.choices:
        return
    asked, left = ask.body, ask.leaves_after is not None
    wanted = asked.get("n", 1) * (len(asked["prompt"]) if ask.name == "batch-0" else 1)
    if len(reply.choices) != wanted:
        yield f"{len(reply.choices)} answers to a request for {wanted}"
    for choice in reply.choices:
        count = len(choice.tokens)
        if not count or count > asked["max_tokens"]:
            yield f"{count} tokens of at most {asked['max_tokens']}"
        if not left and asked.get("ignore_eos") and choice.finish != "length":
            yield f"ended by {choice.finish!r}, asked to go on to its length"
        if choice.finish == "length" and ask.kind != "end" and count != asked["max_tokens"]:
            yield f"{count} tokens, said to be all of {asked['max_tokens']}"
        if asked.get("top_k") == 4 and not _among_the_first(choice):
            yield "a token that top_k rules out"
        yield from _unfit(ask, choice)


def _among_the_first(choice: Choice) -> bool:
    """Whether each sampled token is one of the most probable that are listed beside it."""
    return all(
        entry["logprob"] >= min(other["logprob"] for other in entry["top_logprobs"]) - CLOSE
        for entry in choice.logprobs["content"]
    )


def _unfit(ask: Ask, choice: Choice) -> Iterator[str]:
    """Structure that was asked for and is not there, in an answer that was not cut off."""
    if choice.finish == "length":
        return
    if "response_format" in ask.body:
        try:
            found = json.loads(choice.text)
        except ValueError:
            yield f"no JSON: {choice.text!r}"
            return
        if ask.body["response_format"]["type"] == "json_schema" and (
            set(found) != set(SCHEMA["properties"]) or not isinstance(found["age"], int)
        ):
            yield f"not of the schema: {found}"
    rules = ask.body.get("structured_outputs", {})
    if "regex" in rules and not re.fullmatch(rules["regex"], choice.text):
        yield f"not of the regular expression: {choice.text!r}"
    if "choice" in rules and choice.text not in rules["choice"]:
        yield f"none of the choices: {choice.text!r}"


def of_the_end(server: Server, drafts: int, arms: set[str]) -> Iterator[str]:
    """What a server is found to be when its requests are over.

    Args:
        drafts: tokens of a draft, at most.
        arms: what must have been verified.
    """
    if server.lives():
        time.sleep(2 * EVERY_S)  # what the page says now may be older than the last reply
        server.until("every request to be over", lambda: _all_stopped(server))
        yield from _impossible(server.page(), drafts, arms)
    else:
        yield "the engine died"
    yield from _logged(server.log())


def _impossible(page: str, drafts: int, arms: set[str]) -> Iterator[str]:
    """What the page of a server, all of whose requests are over, says that cannot be so."""
    started, stopped = metric(page, "hvd_requests_started_total"), _stopped(page)
    if not started or started != stopped:
        yield f"{started:.0f} requests started and {stopped:.0f} stopped"
    if faults := metric(page, "hvd_faults_total"):
        yield f"{faults:.0f} faults"
    for arm in ("cache", "model"):
        cycles, drafted, accepted = (
            metric(page, f"hvd_{name}_total", arm=arm) for name in ("cycles", "drafted", "accepted")
        )
        if not cycles >= 5 * (arm in arms):
            yield f"{cycles:.0f} cycles verified a {arm} draft"
        if not accepted <= drafted <= drafts * cycles:
            yield f"{arm}: {cycles:.0f} cycles, {drafted:.0f} drafted, {accepted:.0f} accepted"
    said = "vllm:spec_decode_num_"
    many, drafted, accepted = (
        metric(page, f"{said}{what}_total")
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if not 0 < accepted <= drafted <= drafts * many:
        yield f"vLLM counts {many:.0f} drafts, {drafted:.0f} drafted, {accepted:.0f} accepted"
    places = [
        metric(page, f"{said}accepted_tokens_per_pos_total", position=str(place))
        for place in range(drafts)
    ]
    if sum(places) != accepted or places != sorted(places, reverse=True) or places[0] > many:
        yield f"vLLM counts accepted tokens by place as {places}"


def _stopped(page: str) -> float:
    return metric(page, "hvd_requests_stopped_total")


def _all_stopped(server: Server) -> bool:
    """Whether the page has come to say that every request is over."""
    page = server.page()
    return metric(page, "hvd_requests_started_total") == _stopped(page) > 0


def _logged(log: str) -> Iterator[str]:
    """The first exception in the log, which no reply may have shown."""
    _, _, after = log.partition("Traceback (most recent call last)")
    if after:
        lines = after.splitlines()[1:]
        raised = (i for i, line in enumerate(lines) if RAISED.search(line))
        last = next(raised, len(lines) - 1)
        yield "in the log: " + "\n".join(lines[max(0, last - 6) : last + 1])
