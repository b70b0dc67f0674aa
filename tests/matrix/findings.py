"""Sends asks to a running server, several at a time; what is wrong with its answers, a sentence for
each fault, so that one run shows all."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import httpx

from decoder.telemetry.metrics import EVERY_S
from tests.matrix.asks import SCHEMA, Ask
from tests.server import Server, metric

CLOSE: Final = 1e-3
"""Of log probabilities: engines that verify in batches of other shapes add up in another order."""
ROUNDS: Final = 15
"""Looks at the metrics page, until it says that every request is over."""
RAISED: Final = re.compile(r"(?:^|\] )[\w.]*(?:Error|Exception)\b")
"""The line of a traceback that names the exception, behind vLLM's own prefix or without one."""


REQUEST_S = 300.0


@dataclass(frozen=True)
class Choice:
    """One answer; ``logprobs`` is the server's own record, or None."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: Any = None


@dataclass(frozen=True)
class Reply:
    """What a request got. ``status`` 0: the connection broke, ``error`` says how."""

    status: int
    choices: list[Choice] = field(default_factory=list)
    error: str = ""


def send_all(url: str, asks: Sequence[Ask], together: int) -> dict[str, Reply]:
    """Replies by the names of the asks, ``together`` of which are under way at any time."""
    limits = httpx.Limits(max_connections=together)
    with (
        httpx.Client(base_url=url, timeout=REQUEST_S, limits=limits) as client,
        ThreadPoolExecutor(together) as pool,
    ):
        replies = pool.map(lambda ask: send(client, ask), asks)
        return {ask.name: reply for ask, reply in zip(asks, replies, strict=True)}


def send(client: httpx.Client, ask: Ask) -> Reply:
    """Ask once; whatever goes wrong is in the reply."""
    try:
        if ask.body.get("stream"):
            return _streamed(client, ask)
        response = client.post(ask.path, json=ask.body, headers=ask.headers)
        if not response.is_success:
            return Reply(response.status_code, error=response.text[:500])
        return Reply(response.status_code, [_choice(c) for c in response.json()["choices"]])
    except httpx.HTTPError as error:
        return Reply(0, error=f"{type(error).__name__}: {error}")


def _choice(choice: dict[str, Any]) -> Choice:
    message = choice.get("message") or {"content": choice.get("text")}
    return Choice(
        list(choice.get("token_ids") or ()),
        choice["finish_reason"] or "",
        message.get("content") or "",
        [call["function"] for call in message.get("tool_calls") or ()],
        choice.get("logprobs"),
    )


def _streamed(client: httpx.Client, ask: Ask) -> Reply:
    tokens, text, finish = defaultdict[int, list[int]](list), "", ""
    calls = defaultdict[int, dict[str, str]](lambda: {"name": "", "arguments": ""})
    with client.stream("POST", ask.path, json=ask.body, headers=ask.headers) as response:
        if not response.is_success:
            return Reply(response.status_code, error=response.read().decode()[:500])
        pieces = 0
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                return Reply(500, error=str(event["error"])[:500])
            for choice in event["choices"]:
                tokens[choice["index"]] += choice.get("token_ids") or ()
                text += choice["delta"].get("content") or ""
                finish = choice.get("finish_reason") or finish
                for piece in choice["delta"].get("tool_calls") or ():
                    for part, said in (piece.get("function") or {}).items():
                        calls[piece["index"]][part] += said or ""
            pieces += 1
            if pieces == ask.leaves_after:
                break
        return Reply(response.status_code, [Choice(tokens[0], finish, text, list(calls.values()))])


def of_replies(
    asks: list[Ask], got: Mapping[str, Reply], expected: Mapping[str, Reply]
) -> Iterator[str]:
    """Replies held to what plain vLLM answered, and to what was asked."""
    for ask in asks:
        mine, plain = got[ask.name], expected[ask.name]
        if mine.status != plain.status:
            yield f"{ask.name}: status {mine.status} instead of {plain.status}: {mine.error}"
        elif ask.exact:
            found = differences(asdict(mine), asdict(plain), close=CLOSE)
            yield from (f"{ask.name}{what}" for what in itertools.islice(found, 5))
        yield from (f"{ask.name}: {what}" for what in _broken_promises(ask, mine))


def differences(got: Any, expected: Any, at: str = "", close: float = 1e-4) -> Iterator[str]:
    """A sentence for each place where two answers differ, numbers by more than
    ``close``: batches of other shapes add up in another order."""
    if isinstance(got, dict) and isinstance(expected, dict):
        for name in sorted(got.keys() | expected.keys()):
            yield from differences(got.get(name), expected.get(name), f"{at}.{name}", close)
    elif isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            yield from differences(one, other, f"{at}[{index}]", close)
    elif isinstance(got, float) and isinstance(expected, float):
        if not abs(got - expected) <= close:
            yield f"{at}: {got} instead of {expected}"
    elif got != expected:
        yield f"{at}: {got!r} instead of {expected!r}"


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
        for _ in range(ROUNDS):
            time.sleep(2 * EVERY_S)  # what the page says now may be older than the last reply
            if _all_stopped(server):
                break
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
