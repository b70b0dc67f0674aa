"""Hybrid verified decoding inside vLLM: in serving, only this and ``vllm_cpu`` import it.

vLLM keeps its loop, scheduler, sampler and KV cache. Through the entry point
``vllm.general_plugins`` this plugin wraps six methods:

======================================  =======================================================
``Worker.load_model``                   afterwards: make our worker for this engine
``Worker.compile_or_warm_up_model``     afterwards: profile what a step costs
``GPUModelRunner.propose_draft_token_ids``  observe what was committed, choose, draft
``GPUModelRunner.execute_model``        before: stop the requests the scheduler finished
``GPUModelRunner._input_fits_in_drafter``  asked for our draft length, not for the largest one
``Worker.shutdown``                     before: send what is left
======================================  =======================================================

With ``method: eagle3`` both arms exist. The EAGLE3 passes run only when some request of the batch
wants a model draft; otherwise the drafter is asked for zero tokens, and what it would have read
waits (``vllm_drafter``). With ``method: suffix`` the arms are ``cache`` and ``none``.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from decoder.contracts.errors import EngineError
from decoder.contracts.settings import KafkaSettings
from decoder.costs import LiveCosts
from decoder.engines.vllm.drafter import MUCH, LateDrafter, guarded
from decoder.engines.vllm.profile import profile
from decoder.engines.vllm.sampling import mend_sampling
from decoder.payoff.token_classes import token_class_table
from decoder.policy.pricing import CostTable
from decoder.requests import Committed, Decision, RequestOptions
from decoder.scope import scope_of
from decoder.settings import WorkerSettings

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from decoder.worker import Worker

log = logging.getLogger(__name__)

VLLM_SERIES: Final = "0.32."
"""The wrapped methods are not a public interface: another series may differ without a sign."""
HOW_TO_START: Final = (
    "Start it with 'hvd serve', or: HVD_WORKER_ENABLED=1 VLLM_USE_V2_MODEL_RUNNER=0 vllm serve "
    'MODEL --speculative-config \'{"method": "eagle3", "model": DRAFTER, '
    '"num_speculative_tokens": 64, "disable_padded_drafter_batch": true}\''
)
LABEL_LIMIT: Final = 64
"""Characters of a client-given name: telemetry keys must not become a channel for text."""
_MARK: Final = "_hvd_wrapped"
_NOTHING: Final = Decision("none")


def register() -> None:
    """Entry point; vLLM calls it in each of its processes, perhaps more than once.

    Raises:
        EngineError: switched on, but this vLLM cannot host it.
        SettingsError: a setting has an unknown name or a bad value.
    """
    if os.environ.get("HVD_WORKER_ENABLED", "").lower() not in ("1", "true", "yes", "on"):
        return
    settings = WorkerSettings.load()
    import vllm

    if not vllm.__version__.startswith(VLLM_SERIES):
        raise EngineError(
            f"this plugin is made for vLLM {VLLM_SERIES}x, found {vllm.__version__}: install the "
            "pinned version, or unset HVD_WORKER_ENABLED."
        )
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
        raise EngineError(
            f"set VLLM_USE_V2_MODEL_RUNNER=0: vLLM's V2 runner has no seam yet. {HOW_TO_START}"
        )
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker

    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker  # defines the subclass that is wrapped below

    ours, theirs = logging.getLogger("decoder"), logging.getLogger("vllm")
    ours.handlers, ours.propagate = theirs.handlers, False
    ours.setLevel(theirs.getEffectiveLevel())
    # Its selector warns of every pause of a tenth of a second, which a busy machine is full of.
    logging.getLogger("kafka").setLevel(logging.ERROR)
    mend_sampling()
    for owner in (VllmWorker, *VllmWorker.__subclasses__()):
        if "compile_or_warm_up_model" in vars(owner):
            _wrap(owner, "compile_or_warm_up_model", _warm_up)
    _wrap(VllmWorker, "load_model", functools.partial(_load_model, settings))
    _wrap(VllmWorker, "shutdown", _shutdown)
    _wrap(GPUModelRunner, "propose_draft_token_ids", _propose)
    _wrap(GPUModelRunner, "execute_model", _execute_model)
    _wrap(GPUModelRunner, "_input_fits_in_drafter", _input_fits_in_drafter)


def worker_of(runner: GPUModelRunner) -> Worker:
    """The hybrid worker of a model runner."""
    worker: Worker = runner._hvd_worker
    return worker


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


def _load_model(
    settings: WorkerSettings, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(self, *args, **kwargs)
    self.model_runner._hvd_worker = _attach(self.model_runner, settings)
    return result


def _attach(runner: GPUModelRunner, settings: WorkerSettings) -> Worker:
    from transformers import AutoTokenizer

    # Brings numba, which must not be there before vLLM's CPU worker begins: that looks through all
    # modules for kernels and stumbles over llvmlite's library object.
    from decoder.worker import make_worker

    config, speculative = runner.vllm_config, runner.speculative_config
    if speculative is None or speculative.method not in ("eagle3", "suffix"):
        method = None if speculative is None else speculative.method
        raise EngineError(f"speculative method {method!r} cannot be hybrid. {HOW_TO_START}")
    has_model = speculative.method == "eagle3"
    if has_model and not speculative.disable_padded_drafter_batch:
        raise EngineError(f'set "disable_padded_drafter_batch": true. {HOW_TO_START}')
    if config.parallel_config.world_size > 1:
        # Every rank would have to make the same choice in the same step, swaps included.
        raise EngineError("one rank a worker: scale out with replicas, not tensor parallelism.")
    model = config.model_config
    tokenizer = AutoTokenizer.from_pretrained(
        model.tokenizer, trust_remote_code=model.trust_remote_code
    )
    known = len(tokenizer)
    entries = tokenizer.convert_ids_to_tokens(list(range(known)))
    missing = max(0, model.get_vocab_size() - known)
    drafter = speculative.draft_model_config.model if has_model else None
    worker = make_worker(
        settings,
        KafkaSettings.load(),
        scope_of(model.model, drafter, model.revision),
        token_class_table(entries + [None] * missing),
        has_model,
    )

    def failed() -> None:
        worker.faults += 1

    runner._hvd_late = None
    if has_model and _may_read_late(runner):
        runner._hvd_late = LateDrafter(runner.drafter)
        runner.drafter.propose = guarded(runner._hvd_late, failed)
    return worker


def _may_read_late(runner: GPUModelRunner) -> bool:
    """Whether what the drafter reads is a matter of its own rank, and of tokens alone."""
    drafter, parallel = runner.drafter, runner.vllm_config.parallel_config
    plain = not (drafter.supports_mm_inputs or drafter.uses_mrope)
    return plain and parallel.data_parallel_size == 1


def _warm_up(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    worker = getattr(self.model_runner, "_hvd_worker", None)
    if worker is not None:
        try:
            worker.router.costs = LiveCosts(profile(self.model_runner, worker.scope))
            shown = dict(zip(*_grid(worker.router.costs.table), strict=True))
            log.info("a step costs, in ms by tokens: %s", shown)
        except Exception:  # without a profile the served steps are the first measurement
            log.exception("steps cannot be profiled: costs are learned from service alone")
            worker.router.costs = LiveCosts()
    return result


def _grid(table: CostTable) -> tuple[tuple[int, ...], list[float]]:
    return table.tokens, [round(us / 1e3, 1) for us in table.verify_us]


def _shutdown(original: Callable[..., Any], self: Any) -> Any:
    worker = getattr(getattr(self, "model_runner", None), "_hvd_worker", None)
    if worker is not None:
        worker.close()
        del self.model_runner._hvd_worker
    return original(self)


def _execute_model(
    original: Callable[..., Any],
    runner: GPUModelRunner,
    scheduler_output: SchedulerOutput,
    *args: Any,
    **kwargs: Any,
) -> Any:
    worker = getattr(runner, "_hvd_worker", None)
    if worker is not None:
        for request in scheduler_output.finished_req_ids:
            # Ends by limit or stop token were seen when they were committed; what is left ended
            # by a stop string or by the client.
            worker.router.stop(request, "abort")
            if runner._hvd_late is not None:
                runner._hvd_late.forget(request)
    return original(runner, scheduler_output, *args, **kwargs)


def _input_fits_in_drafter(
    original: Callable[..., Any], runner: GPUModelRunner, metadata: Any
) -> bool:
    """Near the end of the context vLLM would stop proposing, and verify zeros instead.

    It reserves ``num_speculative_tokens``, here the largest cache draft, for any drafter. A cache
    draft is cut to the room its request has, and labels need every committed token, so proposing
    goes on; only the model draft is left out where it does not fit.
    """
    worker = getattr(runner, "_hvd_worker", None)
    if worker is None or metadata is None:
        return bool(original(runner, metadata))
    tokens = worker.settings.model_draft_tokens
    runner._hvd_drafter_fits = (
        metadata.max_seq_len + tokens <= runner.effective_drafter_max_model_len
    )
    return True


def _propose(
    original: Callable[..., Any],
    runner: GPUModelRunner,
    scheduler_output: SchedulerOutput,
    sampled_token_ids: Any,
    *args: Any,
    **kwargs: Any,
) -> list[list[int]]:
    worker = getattr(runner, "_hvd_worker", None)
    names = list(runner.input_batch.req_ids)
    decisions: list[Decision] = []
    if worker is not None:  # None while vLLM warms up on dummy requests
        try:
            decisions = _choose(worker, runner, scheduler_output, sampled_token_ids, names)
        except Exception:  # a fault of ours must cost speed, never a request
            worker.faults += 1
            log.exception("choosing drafts failed: this step goes on without drafts")
    wanted = any(d.arm == "model" for d in decisions) and runner._hvd_drafter_fits
    drafted: list[list[int]] = [[]] * len(names)
    if runner.speculative_config.method == "eagle3":
        tokens = max((d.room for d in decisions if d.arm == "model"), default=0) if wanted else 0
        if worker is not None and runner._hvd_late is not None:
            # An ended request's blocks may be given to a later prompt that begins alike.
            ended = any(
                s and n not in worker.router for n, s in zip(names, sampled_token_ids, strict=False)
            )
            runner._hvd_late.names, runner._hvd_late.catch_up = names, ended
        scheduler_output.num_spec_tokens_to_schedule = tokens
        drafts = original(runner, scheduler_output, sampled_token_ids, *args, **kwargs)
        if tokens:
            drafted = drafts.tolist()  # rows without tokens where the drafter failed
    if not decisions:
        return [[] for _ in names]
    return [_draft_of(d, mine) for d, mine in zip(decisions, drafted, strict=True)]


def _draft_of(decision: Decision, model_draft: list[int]) -> list[int]:
    if decision.arm == "cache":
        return list(decision.tokens)
    return model_draft[: decision.room] if decision.arm == "model" else []


def _choose(
    worker: Worker,
    runner: GPUModelRunner,
    scheduler_output: SchedulerOutput,
    sampled_token_ids: list[list[int]],
    names: list[str],
) -> list[Decision]:
    router = worker.router
    verified = scheduler_output.scheduled_spec_decode_tokens
    outcomes = []
    for name, sampled in zip(names, sampled_token_ids, strict=True):
        if not sampled:
            continue  # a prompt only partly read: nothing was committed yet
        state = runner.requests[name]
        if name not in router and len(state.output_token_ids) == len(sampled):
            prompt = np.asarray(state.prompt_token_ids or (), dtype=np.int32)
            router.start(name, prompt, _options(state.sampling_params, runner.max_model_len))
        outcomes.append(Committed(name, sampled, len(verified.get(name, ()))))
    late = runner._hvd_late
    usual = late is None or late.caught_up < MUCH
    router.observe(outcomes, scheduler_output.total_num_scheduled_tokens, usual)
    live = {outcome.request for outcome in outcomes}
    chosen = iter(router.choose([name for name in names if name in live]))
    return [next(chosen) if name in live else _NOTHING for name in names]


def _options(parameters: Any, max_model_len: int) -> RequestOptions:
    extra = parameters.extra_args or {}
    # Not ``all_stop_token_ids``: with ignore_eos that still holds the ends vLLM goes on past.
    stops = {*(parameters.stop_token_ids or ()), parameters.eos_token_id} - {None}
    return RequestOptions(
        max_tokens=parameters.max_tokens or max_model_len,
        max_model_len=max_model_len,
        stop_ids=frozenset(stops),
        tenant=str(extra.get("hvd_tenant", ""))[:LABEL_LIMIT],
        workload=str(extra.get("hvd_workload", ""))[:LABEL_LIMIT],
        speculate=str(extra.get("hvd_speculate", "on")).lower() not in ("off", "false", "0", "no"),
    )
