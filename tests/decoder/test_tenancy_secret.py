"""A secret in one tenant's output cannot be drawn out through another's drafts, timing aside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from decoder.core.router import RequestOptions
from decoder.tenancy.identities import Identities
from tests.decoder.simulated import Committed, Router

KEY = b"0123456789abcdef"
SECRET = list(range(100, 140))


def asked(caller: str, salt: str = "") -> dict[str, Any]:
    """What the middleware writes for a request."""
    identities = Identities(KEY, "middleware")
    return identities.sealed(identities.make(caller, salt, "", "r"))


def options(extra: dict[str, Any] | None) -> RequestOptions:
    """What the engine makes of it."""
    identity = Identities(KEY, "middleware").of(extra, "engine's own")
    return RequestOptions(
        400, 4096, tenant=identity.tenant, opaque=identity.request, cache_key=identity.key
    )


@pytest.fixture(params=["finished", "running"])
def router(request: pytest.FixtureRequest) -> Iterator[Router]:
    """Every draft is verified whole; the key "a" has written the secret, or is writing it."""
    made = Router()
    made.start("victim", np.array(SECRET, np.int32), options(asked("key:a")))
    made.observe([Committed("victim", SECRET, 0)], 1)
    made.choose(["victim"])
    if request.param == "finished":
        made.stop("victim", "stop")
    yield made
    made.close()


def drawn(router: Router, extra: dict[str, Any] | None) -> set[int]:
    """Every token of the secret that drafts show to whoever writes its beginnings."""
    shown: set[int] = set()
    for begin in range(len(SECRET) - 1):
        for prompted in (False, True):
            text = SECRET[begin : begin + 12]
            prompt = [*text[:-1], 1, 2] if prompted else [3]
            router.start("thief", np.array(prompt, np.int32), options(extra))
            for token in text:
                router.observe([Committed("thief", [token], 0)], 1)
                (decision,) = router.choose(["thief"])
                known = {*prompt, *text}
                shown |= {*decision.tokens} & {*SECRET} - known
            router.stop("thief", "stop")
    return shown


def test_the_tenant_itself_is_offered_it(router: Router) -> None:
    assert drawn(router, asked("key:a")) >= {*SECRET[12:30]}


@pytest.mark.parametrize(
    "extra",
    [
        asked("key:b"),
        asked(""),
        asked("header:a"),
        asked("key:a", "a salt"),
        {"hvd_tenant": asked("key:a")["hvd_tenant"]},
        {**asked("key:b"), "hvd_tenant": asked("key:a")["hvd_tenant"]},
        {**asked("key:a"), "hvd_seal": asked("key:b")["hvd_seal"]},
        {"hvd_tenant": "key:a"},
        {},
        None,
    ],
)
def test_nobody_else_is_shown_any_of_it(router: Router, extra: dict[str, Any] | None) -> None:
    assert drawn(router, extra) == set()


def test_of_one_tenant_what_another_salt_wrote_is_not_shown(router: Router) -> None:
    router.start("salted", np.array([1], np.int32), options(asked("key:b", "one")))
    router.observe([Committed("salted", SECRET, 0)], 1)
    router.stop("salted", "stop")
    assert drawn(router, asked("key:b", "one"))
    assert not drawn(router, asked("key:b", "two")) and not drawn(router, asked("key:b"))
