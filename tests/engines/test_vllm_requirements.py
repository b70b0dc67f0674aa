"""Every setting of vLLM that matters is clamped or refused, as the table says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decoder.contracts.errors import EngineError
from decoder.engines.vllm import runner_choice
from decoder.engines.vllm.requirements import (
    REQUIREMENTS,
    Requirement,
    can_defer_prefill,
    check,
    longest_draft,
    within,
)
from decoder.settings import WorkerSettings
from tests.engines.configs import Change, engine, on_v2, setting

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


def model(**facts: Any) -> Change:
    """A model that has ``facts``: checkpoints of all these kinds are not at hand."""

    def change(config: Any) -> None:
        real = config.model_config
        names = (
            "is_moe", "is_multimodal_model", "uses_mrope", "is_encoder_decoder", "is_hybrid",
            "has_inner_state", "is_diffusion", "runner_type", "enable_prompt_embeds",
            "max_model_len", "logits_processors", "get_diff_sampling_param",
        )  # fmt: skip
        told = {name: getattr(real, name) for name in names} | facts
        object.__setattr__(config, "model_config", SimpleNamespace(**told))

    return change


def both(*changes: Change) -> Change:
    def change(config: Any) -> None:
        for each in changes:
            each(config)

    return change


def given(method: str = "eagle3", **speculative: Any) -> tuple[Callable[[], Any], None]:
    return lambda: engine(method, **speculative), None


def changed(change: Change | str, value: Any = True) -> tuple[Callable[[], Any], Change]:
    return engine, setting(change, value) if isinstance(change, str) else change


BATCHED = {"num_speculative_tokens_per_batch_size": [(1, 8, 5), (9, 99, 1)]}
PARALLEL, CONTEXT = "parallel_config", "--decode-context-parallel-size"
CASES: dict[tuple[str, str], tuple[Callable[[], Any], Change | None]] = {
    ("--speculative-config", "absent"): given(""),
    ("method", "any other"): given("ngram", num_speculative_tokens=3, prompt_lookup_max=4),
    ("num_speculative_tokens", "above 128"): given(num_speculative_tokens=129),
    ("num_speculative_tokens", "below HVD_WORKER_SUFFIX_MAX_DRAFT"):
        given("suffix", num_speculative_tokens=16),
    ("num_speculative_tokens", "below HVD_WORKER_MODEL_DRAFT_TOKENS"):
        given(num_speculative_tokens=3),
    ("num_speculative_tokens_per_batch_size", "given"): given(num_speculative_tokens=5, **BATCHED),
    ("max_model_len of the drafter", "below the model's"): given(max_model_len=512),
    ("disable_padded_drafter_batch", "false with eagle3"):
        given(disable_padded_drafter_batch=False),
    ("draft_sample_method", "probabilistic"): given(draft_sample_method="probabilistic"),
    ("rejection_sample_method", "synthetic, block"): given(rejection_sample_method="block"),
    ("parallel_drafting", "true"): changed("speculative_config.parallel_drafting"),
    ("enable_adaptive_verification", "true with the V1 runner"):
        changed("speculative_config.enable_adaptive_verification"),
    ("enable_adaptive_verification", "true with the V2 runner"):
        changed(both(on_v2, setting("speculative_config.enable_adaptive_verification", True))),
    ("suffix_decoding_*", "not the defaults"):
        given("suffix", suffix_decoding_max_cached_requests=7),
    ("disable_padded_drafter_batch", "true with eagle3 on the V2 runner"): changed(on_v2),
    ("--worker-cls, --scheduler-cls", "given, with the V2 runner"):
        changed(both(on_v2, setting("parallel_config.worker_cls", "some.module.Worker"))),
    ("--async-scheduling", "true, with the V1 runner"):
        changed("scheduler_config.async_scheduling"),
    ("--enable-batch-sharded-sampling", "true"):
        changed(f"{PARALLEL}.enable_batch_sharded_sampling"),
    ("--watermark-config", "given"): changed(both(on_v2, setting("watermark_config", object()))),
    ("--tensor-parallel-size", "2 or more, with the V2 runner"):
        changed(both(on_v2, setting(f"{PARALLEL}.tensor_parallel_size", 2))),
    ("draft_tensor_parallel_size", "other than --tensor-parallel-size"):
        changed("speculative_config.draft_tensor_parallel_size", 2),
    ("--pipeline-parallel-size", "2 or more"): changed(f"{PARALLEL}.pipeline_parallel_size", 2),
    (f"{CONTEXT}, --prefill-context-parallel-size", "2 or more"):
        changed(f"{PARALLEL}.decode_context_parallel_size", 2),
    ("--data-parallel-size", "2 or more, mixture of experts"):
        changed(both(model(is_moe=True), setting(f"{PARALLEL}.data_parallel_size", 2))),
    ("--enable-dbo, --ubatch-size", "on"): changed(f"{PARALLEL}.enable_dbo"),
    ("--enable-lora", "true"): changed("lora_config", object()),
    ("--enable-lora", "true, with the V2 runner"):
        changed(both(on_v2, setting("lora_config", object()))),
    ("--enable-prompt-embeds", "true"): changed(model(enable_prompt_embeds=True)),
    ("model", "multimodal, or with positions of several dimensions"):
        changed(model(uses_mrope=True)),
    ("--weight-transfer-config", "given"): changed("weight_transfer_config", object()),
    ("--kv-transfer-config", "given"): changed("kv_transfer_config", object()),
    ("--structured-outputs-config", "backend lm-format-enforcer"):
        changed("structured_outputs_config.backend", "lm-format-enforcer"),
    ("--generation-config, --override-generation-config", "min_p above 0"):
        changed("model_config.override_generation_config", {"min_p": 0.05}),
    ("--logits-processors", "given, or installed as vllm.logits_processors"):
        changed("model_config.logits_processors", ["some.module:Processor"]),
    ("model", "encoder-decoder, recurrent (Mamba and others), diffusion or pooling"):
        changed(model(is_hybrid=True)),
}  # fmt: skip


def title(row: Requirement) -> str:
    return f"{row.setting}: {row.values}"


@pytest.mark.parametrize("row", REQUIREMENTS, ids=title)
def test_each_row_applies_to_a_real_configuration(
    row: Requirement, caplog: pytest.LogCaptureFixture
) -> None:
    make, change = CASES[row.setting, row.values]
    config, settings = make(), WorkerSettings()
    if change is not None:
        assert not row.applies(config, settings)
        change(config)
    assert row.applies(config, settings)
    if row.verdict == "refused":
        with pytest.raises(EngineError) as refusal:
            check(config, settings)
        assert str(refusal.value) == f"{row.setting} ({row.values}): {row.why}"
        return
    with caplog.at_level(logging.WARNING, "decoder"):
        check(config, settings)
    assert row.why in caplog.text


@pytest.mark.parametrize(
    "fact",
    [
        {"is_encoder_decoder": True}, {"has_inner_state": True}, {"is_diffusion": True},
        {"runner_type": "pooling"},
    ],
)  # fmt: skip
def test_models_that_do_not_decode_by_attention_alone_are_refused(fact: dict[str, Any]) -> None:
    config = engine()
    model(**fact)(config)
    with pytest.raises(EngineError, match="from attention alone"):
        check(config, WorkerSettings())


@pytest.mark.parametrize(
    "change",
    [
        both(on_v2, setting("scheduler_config.async_scheduling", True)),
        setting(f"{PARALLEL}.tensor_parallel_size", 2),
        setting(f"{PARALLEL}.data_parallel_index", 1),
    ],
)
def test_settings_without_a_row_are_accepted(change: Change) -> None:
    config = engine()
    change(config)
    check(config, WorkerSettings())


@pytest.mark.parametrize(
    "change",
    [
        setting("speculative_config.enable_adaptive_verification", True),
        setting("attention_config.hisparse_config", object()),
        setting("watermark_config", object()),
        setting("parallel_config.worker_cls", next(iter(runner_choice.WORKERS.values()))),
    ],
)
def test_features_of_v2_alone_select_v2(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    config = engine("suffix", num_speculative_tokens=9)
    theirs = type(config)._get_v2_model_runner_unsupported_features
    assert len(runner_choice.unsupported(theirs, config)) == 1
    change(config)
    assert not runner_choice.unsupported(theirs, config)


def test_a_models_own_min_p_is_refused_and_zero_of_the_operators_is_not(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"min_p": 0.1, "temperature": 0.7}')
    config = engine()
    setting("model_config.generation_config", str(tmp_path))(config)
    with pytest.raises(EngineError, match="override-generation-config"):
        check(config, WorkerSettings())
    setting("model_config.override_generation_config", {"min_p": 0})(config)
    check(config, WorkerSettings())


def test_logits_processors_of_other_packages_are_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = engine(), tmp_path / "processors-1.dist-info"
    check(config, WorkerSettings())
    folder.mkdir()
    (folder / "METADATA").write_text("Name: processors\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[vllm.logits_processors]\nown = processors:Own\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineError, match="silently"):
        check(config, WorkerSettings())


@pytest.mark.parametrize("backend", ["auto", "xgrammar", "guidance", "outlines"])
def test_grammars_roll_back_rejected_drafts(backend: str) -> None:
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from vllm.v1.structured_output.backend_outlines import OutlinesBackend
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    config = engine("suffix", num_speculative_tokens=64)
    setting("structured_outputs_config.backend", backend)(config)
    check(config, WorkerSettings())
    made = {"guidance": GuidanceBackend, "outlines": OutlinesBackend}.get(backend, XgrammarBackend)
    tokenizer = cached_tokenizer_from_config(config.model_config)
    kind = made(config, tokenizer=tokenizer, vocab_size=config.model_config.get_vocab_size())
    grammar = kind.compile_grammar(StructuredOutputOptions.REGEX, "(red|green)( (red|green)){40}")
    draft = tokenizer.encode("red" + " green red" * 20, add_special_tokens=False)
    assert 40 <= len(draft) <= 64
    for accepted in (0, 3):
        assert grammar.validate_tokens(draft[accepted:]) == draft[accepted:]
        assert grammar.accept_tokens("r", draft[accepted:])
        grammar.rollback(len(draft) - 3)
    assert grammar.validate_tokens([*draft[3:], draft[0]]) == draft[3:]


def test_the_configuration_of_hvd_serve_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    for config in (engine(), engine("suffix", num_speculative_tokens=64)):
        with caplog.at_level(logging.WARNING, "decoder"):
            check(config, WorkerSettings())
    assert not [r for r in caplog.records if r.name.startswith("decoder")]


def test_every_row_has_a_case_and_every_refusal_names_a_remedy() -> None:
    rows = {(r.setting, r.values) for r in REQUIREMENTS}
    assert len(rows) == len(REQUIREMENTS) and rows == CASES.keys()
    for row in REQUIREMENTS:
        if row.verdict == "refused":
            words = ("set ", "unset ", "leave ", "Start it with", "out:")
            assert any(word in row.why for word in words), title(row)


def test_no_draft_exceeds_vllms_max_spec_len() -> None:
    from vllm.v1.sample.rejection_sampler import MAX_SPEC_LEN

    config = engine(num_speculative_tokens=512)
    assert longest_draft(config) == MAX_SPEC_LEN
    asked = WorkerSettings(suffix_max_draft=512, suffix_max_depth=512, model_draft_tokens=16)
    assert within(config, asked).suffix_max_draft == MAX_SPEC_LEN


@pytest.mark.parametrize(
    "change",
    [
        model(is_multimodal_model=True),
        model(uses_mrope=True),
        setting("kv_transfer_config", object()),
        setting("parallel_config.data_parallel_size", 2),
    ],
)
def test_prefill_is_deferred_only_where_tokens_and_positions_are_the_inputs(
    change: Change,
) -> None:
    config = engine()
    assert can_defer_prefill(config)
    change(config)
    assert not can_defer_prefill(config)
