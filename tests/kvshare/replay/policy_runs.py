"""A policy over a few prompts, and what it reused."""

from collections.abc import Sequence
from typing import Any

from kvshare.replay.policies import make_policy, parse_policies
from kvshare.replay.requests import Outcome, TokenizedRequest
from tests.kvshare.replay.synthetic import policy_context


def run(
    spec: str, requests: Sequence[TokenizedRequest], capacity: int | None = None, **bench: Any
) -> list[Outcome]:
    """What an arm made of a stream."""
    (parsed,) = parse_policies(spec)
    arm = make_policy(parsed, policy_context(**bench), capacity)
    try:
        return [arm.observe(one) for one in requests]
    finally:
        arm.close()
