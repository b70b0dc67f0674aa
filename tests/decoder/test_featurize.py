"""Features are what their names say: by a plain reading of them, cycle by cycle."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest

from decoder.contracts.bundle import Policy, frequency_policy
from decoder.contracts.features import FEATURES, MEMORY_KEYS, TOKEN_CLASSES
from decoder.core.payoff.token_classes import token_class_table
from decoder.core.router import RequestOptions
from decoder.drafting.suffix import SuffixCache
from decoder.settings import WorkerSettings
from pipelines.replay.cache_drafts import CacheDraft, propose
from tests.conftest import VOCABULARY, naive_accepted_length, random_policy
from tests.decoder.simulated import Committed, Router

Key = tuple[object, ...]


def decayed(values: list[float], start: float, weight: float) -> float:
    """The mean of ``values`` in which each new one has ``weight``."""
    for value in values:
        start += weight * (value - start)
    return start


@dataclass
class Slow:
    """What a request has shown, and its tenant, as plain lists."""

    prompt: list[int]
    allowed: int
    classes: np.ndarray
    output: list[int] = field(default_factory=list)
    took: list[bool] = field(default_factory=list)  # by cycle, whether a cache draft was verified
    waiting: list[tuple[int, list[int]]] = field(default_factory=list)  # place and draft
    known: list[tuple[int, int]] = field(default_factory=list)  # accepted and drafted tokens
    broke: int = 0
    model: list[float] = field(default_factory=list)
    learned: dict[Key, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def keys(self, place: int, draft: list[int]) -> dict[str, Key]:
        text = [*self.prompt, *self.output[:place]]
        return {
            "draft": ("draft", *draft[:8]),
            "context": ("context", *text[-2:]),
            "joint": ("joint", *text[-1:], draft[0]),
        }

    def commit(self, tokens: list[int]) -> None:
        self.output += tokens
        open_still = []
        for place, draft in self.waiting:
            behind = self.output[place:]
            accepted = naive_accepted_length(draft, behind)
            if accepted == len(behind) < len(draft):
                open_still.append((place, draft))
                continue
            self.known.append((accepted, len(draft)))
            if accepted < len(draft):
                self.broke = len(self.output)
            for key in self.keys(place, draft).values():
                self.learned[key].append((accepted, len(draft)))
        self.waiting = open_still

    def features(self, draft: CacheDraft) -> dict[str, float]:
        probs, rival, done = draft.probs, draft.rival, len(self.output)
        length, payoffs = len(probs), [accepted for accepted, _ in self.known]
        agreement = naive_accepted_length(draft.tokens, rival.tokens) if rival else 0
        logs = [float(np.log1p(a)) for a in payoffs]
        firsts = [float(a > 0) for a in payoffs]
        classes = [self.classes[t] for t in draft.tokens]
        counts = {
            "score": draft.score, "match": draft.match_len, "len": length,
            "rival_score": rival.score if rival else 0, "agreement": agreement,
            "rival_match": rival.match_len if rival else 0,
            "rival_len": len(rival.probs) if rival else 0, "prompt_len": len(self.prompt),
            "generated_len": done, "since_break": done - self.broke,
        }  # fmt: skip
        told = {f"log_{name}": float(np.log1p(count)) for name, count in counts.items()}
        told |= {
            "score": draft.score, "match_len": draft.match_len, "draft_len": length,
            "score_share": draft.score / length, "last_prob": probs[-1],
            "rival_prob_1": rival.probs[0] if rival else 0,
            "agreement_share": agreement / length,
            "disagree": rival is not None and not agreement, "local": draft.local,
            "relative_position": done / self.allowed,
            "cache_share": np.mean(self.took[-16:] or [0]),
            "payoff_mean": np.mean(payoffs[-8:] or [0]), "payoff_max": max(payoffs[-8:], default=0),
            "streak": max((done - place for place, _ in self.waiting), default=0),
            "first_recent": decayed(firsts, 0.5, 0.1), "tenant_first": decayed(firsts, 0.5, 0.002),
            "log_payoff_fast": decayed(logs, 0.7, 0.3), "log_payoff_slow": decayed(logs, 0.7, 0.05),
            "tenant_log_payoff": decayed(logs, 0.7, 0.002),
            "model_recent": decayed(self.model, 1.0, 0.1),
        }  # fmt: skip
        for i, name in enumerate(("last", "2nd_last", "3rd_last"), start=1):
            told[f"payoff_{name}"] = payoffs[-i] if len(payoffs) >= i else 0
        for place in (1, 2, 4, 8, 16):
            told[f"prob_{place}"] = probs[place - 1] if length >= place else 0
        for name, key in self.keys(done, draft.tokens).items():
            weight, log, share = 0.0, 0.0, 0.0
            for accepted, drafted in self.learned[key]:
                weight = weight * 0.8 + 1
                log, share = log * 0.8 + np.log1p(accepted), share * 0.8 + accepted / drafted
            told[f"{name}_log_payoff"] = (log + 0.7) / (weight + 1)
            told[f"{name}_share"] = (share + 0.3) / (weight + 1)
            told[f"{name}_log_weight"] = np.log1p(weight)
        for i, name in enumerate(TOKEN_CLASSES):
            told[f"share_{name}"] = np.mean([c[i] for c in classes])
            told[f"first_{name}"] = classes[0][i]
        return told


@pytest.mark.parametrize("policy", [frequency_policy("s", 1.5), random_policy()])
@pytest.mark.parametrize("alphabet", [3, 12])
def test_every_feature_is_what_its_name_says(
    token_classes: np.ndarray, policy: Policy, alphabet: int
) -> None:
    router, cache = Router(policy, classes=token_classes), SuffixCache(WorkerSettings())
    rng, drafts = np.random.default_rng(alphabet), dict[tuple[str, int], dict[str, float]]()
    phrases = [rng.integers(0, alphabet, 9).tolist() for _ in range(6)]
    name = "r"
    text = [token for i in rng.integers(0, 6, 60) for token in phrases[i]]
    prompt, text = text[:60], text[60:]
    slow = Slow(prompt, len(text) + 9, token_classes)
    router.start(name, np.array(prompt, np.int32), RequestOptions(slow.allowed, 1 << 20))
    row = cache.start(name, np.array(prompt, np.int32), "")
    cache.index()
    committed, verified = text[:1], 0
    while committed:
        router.observe([Committed(name, committed, verified)], 1 + verified)
        slow.commit(committed)
        cache.extend(name, committed)
        done = len(slow.output)
        room = max(min(64, slow.allowed - done - 1), 0)
        found = propose(cache, row, np.array(prompt + slow.output, np.int32), room)
        if found is not None:
            drafts[name, done] = slow.features(found)
            slow.waiting.append((done, found.tokens))
        (decision,) = router.choose([name])
        slow.took.append(decision.arm == "cache")
        verified = len(decision.tokens)
        accepted = naive_accepted_length(decision.tokens, text[done:])
        committed = text[done : done + accepted + 1]
    router.close()
    told = {(event.request, event.position): event for event in router.kept.events}
    assert told.keys() == drafts.keys() and len(told) > 40
    assert policy.kind != "frequency" or "cache" in {event.arm for event in told.values()}
    missed = 0  # entries of the memory that gave their slots to others
    for at, expected in drafts.items():
        row = dict(zip(FEATURES, told[at].features.tolist(), strict=True))
        same = pytest.approx({name: float(expected[name]) for name in FEATURES}, abs=1e-5)
        for key in MEMORY_KEYS:
            names = [f"{key}_{what}" for what in ("log_payoff", "share", "log_weight")]
            if row[names[2]] < expected[names[2]] - 1e-5:
                missed += 1
                same.expected.update({name: row[name] for name in names})
        assert row == same
    assert missed < 0.05 * len(MEMORY_KEYS) * len(drafts)


def test_a_token_behind_the_vocabulary_is_of_no_class() -> None:
    router = Router(1e9, classes=np.ones((VOCABULARY, len(TOKEN_CLASSES)), np.float32))
    strange = [1, VOCABULARY, -3, 2, 1]
    router.start("r", np.array([7, 8, *strange, 7, 8], np.int32), RequestOptions(50, 100))
    router.choose(["r"])
    router.close()
    (event,) = router.kept.events
    shares = [event.features[FEATURES.index(f"share_{name}")] for name in TOKEN_CLASSES]
    told = [*strange, 7, 8][: event.draft_len]
    share = sum(0 <= token < VOCABULARY for token in told) / len(told)
    assert event.draft_len > 1 and shares == pytest.approx([share] * len(TOKEN_CLASSES))


def test_token_classes_of_byte_level_and_sentencepiece_entries() -> None:
    vocabulary = ["Ġthe", "▁the", "Ċ", "<0x0A>", "(", "],", "7", ".", None, "word"]
    table = token_class_table(vocabulary)
    names = [
        {c for c, on in zip(TOKEN_CLASSES, row, strict=True) if on} for row in table.astype(bool)
    ]
    assert names[0] == names[1] == {"whitespace"}
    assert names[2] == {"newline"} and "newline" in names[3]
    assert names[4] == {"bracket"} and names[5] == {"bracket", "delimiter"}
    assert names[6] == {"digit"} and names[7] == {"punctuation"}
    assert names[8] == names[9] == set()
