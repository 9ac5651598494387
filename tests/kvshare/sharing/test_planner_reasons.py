"""The reason that users read is the first refusal; that what is left does not pay is only learned from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from delta_tree import DeltaTree, token_ids
from kvshare.reasons import Reason
from kvshare.sharing.plan import NoPlan
from kvshare.sharing.planner import make_plan
from kvshare.sharing.rates import Rates
from tests.kvshare.sharing.prompts import prompt, stored
from tests.kvshare.sharing.test_planner import LIMITS

SLOW = Rates.linear(prefill_tokens_per_s=1e6, load_bytes_per_s=1e3, bytes_per_token=1000)


@pytest.mark.parametrize(
    ("num_equal", "approximate", "can_move", "reason", "by_rates"),
    [
        (40, True, False, Reason.ROTATION_UNKNOWN, True),
        (40, False, True, Reason.EXACT_ONLY, True),
        (0, False, True, Reason.EXACT_ONLY, False),
        (0, True, False, Reason.ROTATION_UNKNOWN, False),
    ],
)
def test_the_reason_is_what_was_refused_first(
    tree: DeltaTree, num_equal: int, approximate: bool, can_move: bool, reason: Reason, by_rates: bool
) -> None:
    """Not that the short equal prefix, which was left, does not pay: that is only learned from."""
    old = prompt(400)
    recipient = token_ids(np.concatenate([old[:num_equal], prompt(30, seed=5), old[100:]]))
    limits = replace(LIMITS, can_move_keys=can_move)
    nodes = [stored(tree, old)]
    plan = make_plan(recipient, nodes, tree.segment, approximate=approximate, limits=limits, rates=SLOW)
    assert isinstance(plan, NoPlan)
    assert (plan.reason, plan.refused_by_rates) == (reason, by_rates)


@pytest.mark.parametrize(("num_equal", "reason"), [(40, Reason.DOES_NOT_PAY), (0, Reason.NOTHING_IN_COMMON)])
def test_the_mode_is_no_reason_where_nothing_else_is_in_common(
    tree: DeltaTree, num_equal: int, reason: Reason
) -> None:
    """Mode approx would not share more."""
    old = prompt(400)
    recipient = token_ids(np.concatenate([old[:num_equal], prompt(360, seed=5)]))
    plan = make_plan(
        recipient, [stored(tree, old)], tree.segment, approximate=False, limits=LIMITS, rates=SLOW
    )
    assert plan == NoPlan(reason, refused_by_rates=reason is Reason.DOES_NOT_PAY)
