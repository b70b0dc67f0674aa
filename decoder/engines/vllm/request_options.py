"""The router's options for a vLLM request."""

from __future__ import annotations

from typing import Any, Final

from decoder.core.requests import RequestOptions
from decoder.tenancy.identities import Identities

_OFF: Final = ("off", "false", "0", "no")


def options_of(
    name: str, parameters: Any, max_model_len: int, identities: Identities
) -> RequestOptions:
    """The router's options for a request with vLLM's ``SamplingParams`` and id ``name``."""
    extra = parameters.extra_args or {}
    # ``all_stop_token_ids`` would include end tokens that vLLM ignores under ignore_eos.
    stops = {*(parameters.stop_token_ids or ()), parameters.eos_token_id} - {None}
    choice, request = choice_of(name)
    identity = identities.of(extra, request)
    return RequestOptions(
        max_tokens=parameters.max_tokens or max_model_len,
        max_model_len=max_model_len,
        stop_ids=frozenset(stops),
        tenant=identity.tenant,
        workload=identity.workload,
        # vLLM counts thinking before the draft, and a draft may begin or end it.
        speculate=parameters.thinking_token_budget is None
        and str(extra.get("hvd_speculate", "on")).lower() not in _OFF,
        opaque=identity.request,
        session=identity.session,
        choice=choice,
        cache_key=identity.key,
        min_tokens=parameters.min_tokens,
    )


def choice_of(name: str) -> tuple[int, str]:
    """Index of a request among its client's choices, and the id of the client's request.

    vLLM splits a request for several choices into one each, with ids ``0_...``, ``1_...``.
    """
    number, separator, request = name.partition("_")
    if separator and number.isdecimal() and number.isascii() and len(number) < 5:
        return int(number), request
    return 0, name
