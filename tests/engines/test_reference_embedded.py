"""The embedded model with its shipped drafter: lossless, and the drafter is worth something."""

from __future__ import annotations

import pytest

from pipelines.embedded import ensure_model
from pipelines.workloads import prompts


@pytest.mark.long
def test_every_method_is_lossless_on_the_embedded_model() -> None:
    from pipelines.embedded import DRAFTER
    from pipelines.lab.drafter.chains import record
    from pipelines.lab.reference import load_engine
    from pipelines.replay.rivals import METHODS, deciding, method
    from tests.engines.tiny import learned_policy

    engine = load_engine(ensure_model(), DRAFTER)
    assert engine.head and engine.stop_ids and engine.max_model_len == 8192
    asked = [next(iter(prompts(kind))) for kind in ("code", "chat")]
    texts = [
        engine.tokenizer.apply_chat_template(
            list(p.messages), add_generation_prompt=True, return_dict=False
        )
        for p in asked
    ]
    plain = method("greedy").session(engine)
    expected = [plain.generate(ids, 32).tokens for ids in texts]
    recorded = [record(engine, ids, out) for ids, out in zip(texts, expected, strict=True)]
    cycles: dict[str, int] = {}
    for name in METHODS:
        if name == "greedy":
            continue
        policy = learned_policy() if name.startswith("hybrid") else None
        chosen = method(name, policy=policy)
        session = chosen.session(engine, None, False, *deciding(chosen))
        for ids, out, accepted in zip(texts, expected, recorded, strict=True):
            made = session.generate(ids, 32)
            assert made.tokens == out, name
            cycles[name] = cycles.get(name, 0) + len(made.cycles)
            for c in made.cycles:
                if c.arm == "model":
                    assert c.accepted == min(accepted[c.position], len(out) - c.position - 1)
        assert session.router.counters.tokens == sum(map(len, expected))
    greedy = sum(len(out) - 1 for out in expected)
    assert cycles["eagle3"] < 0.8 * greedy
