"""Each arm reuses exactly what it says, and nothing of another namespace."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from delta_tree import DeltaTree
from kvshare.errors import ConfigError
from kvshare.logs.requests import any_of
from kvshare.reasons import Reason
from kvshare.replay.measures import waterfalls
from kvshare.replay.policies import make_policy, parse_policies, sharing_options
from kvshare.replay.policies.base import CachePolicy
from kvshare.replay.policies.sharing import SharingPolicy
from kvshare.replay.policies.sharing_options import LossFinder, SharingOptions
from kvshare.replay.requests import TokenizedRequest
from kvshare.replay.rows import SCHEMA, RowMaker, make_row
from kvshare.settings import load_settings
from kvshare.sharing.plan import NoPlan
from kvshare.sharing.rates import Rates
from tests.kvshare.replay.policy_runs import run
from tests.kvshare.replay.synthetic import policy_context, random_tokens, request, stream


def joined(parts: Sequence[list[int]]) -> list[int]:
    return [token for part in parts for token in part]


EDITED, SHIFTED, REORDERED = "edited template", "shifted window", "reordered documents"


def _pair(kind: str) -> tuple[list[int], list[int], int]:
    """A stored prompt, a new one, and how many tokens of the new one the stored one has."""
    rng = np.random.default_rng(1)
    parts = [random_tokens(rng, 120) for _ in range(4)]
    if kind == EDITED:
        slots = [random_tokens(rng, 5) for _ in range(3)]
        return joined(parts), joined([a + b for a, b in zip(parts, [*slots, []], strict=True)]), 480
    if kind == SHIFTED:
        return joined(parts), joined([*parts[1:], random_tokens(rng, 10)]), 360
    return joined(parts), joined([parts[i] for i in (2, 0, 3, 1)]), 480


@pytest.mark.parametrize("arm", ["kvshare-fingerprints-open", "kvshare-open", "kvshare-semantic-open"])
@pytest.mark.parametrize("kind", [EDITED, SHIFTED, REORDERED])
def test_open_kvshare_finds_what_is_there(arm: str, kind: str) -> None:
    """Edits, shifts and other orders: every token but the last that the one donor has."""
    stored, new, num_common = _pair(kind)
    requests = [request(i, tokens, text="the same words") for i, tokens in enumerate((stored, new))]
    outcome = run(arm, requests, embeddings=True)[1]
    assert outcome.num_hit >= num_common - 1
    assert outcome.num_donors == 1
    assert outcome.cross_user


def test_configured_kvshare_repairs_and_refuses() -> None:
    """The production arm computes repairs again, and refuses what saves too little; both are told."""
    stored, new, num_common = _pair(EDITED)
    outcome = run("kvshare-fingerprints", stream([stored, new]))[1]
    assert outcome.num_repaired > 0
    assert outcome.num_hit + outcome.num_repaired == num_common
    rng = np.random.default_rng(2)
    mostly_new = [*random_tokens(rng, 900), *stored[:100], *random_tokens(rng, 300)]
    refused = run("kvshare-fingerprints", stream([stored, mostly_new]))[1]
    assert refused.reason == "not_enough_saved"
    assert refused.num_refused == 100


BOLD = "max_deviation=9:max_risk=1"  # in prompts as short as those below every move is far


def losses_of(requests: Sequence[TokenizedRequest], arm_name: str = "kvshare-fingerprints") -> dict[str, int]:
    """The waterfall of the fingerprints' arm, with its gates as configured unless `arm_name` says more."""
    specs = parse_policies(f"{arm_name},oracle")
    arms, maker = [make_policy(spec, policy_context()) for spec in specs], RowMaker()
    rows = {
        arm.name: pa.Table.from_pylist(
            [make_row(maker.common(one), arm, arm.observe(one), observe_s=0.0) for one in requests],
            schema=SCHEMA,
        )
        for arm in arms
    }
    for arm in arms:
        arm.close()
    (waterfall,) = waterfalls({arm.name: arm.family for arm in arms}, rows.__getitem__)
    return {step.name: step.num_tokens for step in waterfall.steps}


def _variants_of_variants() -> list[list[int]]:
    """A window that moves on, each with a header of its own: what came last was computed after copies."""
    rng = np.random.default_rng(7)
    parts = [random_tokens(rng, 150) for _ in range(5)]
    windows = [parts[:2], parts[:3], parts[1:4], parts[2:5]]
    return [joined([random_tokens(rng, 10), *window]) for window in windows]


def test_copies_of_copies_are_refused_not_lost() -> None:
    """What only KV of a too high generation has is found, and refused for its generation."""
    requests = stream(_variants_of_variants())
    last = run(f"kvshare-fingerprints:{BOLD}:max_generation=1", requests)[-1]
    assert last.num_refused == last.num_refused_generation == 150
    steps = losses_of(requests, f"kvshare-fingerprints:{BOLD}:max_generation=1")
    assert (steps["not_found"], steps["generation"], steps["refused"]) == (0, -150, 0)
    opened = run(f"kvshare-fingerprints:{BOLD}", requests)[-1]
    assert opened.num_hit + opened.num_repaired == last.num_hit + last.num_repaired + 150


def test_donors_beyond_the_limit_are_refused_not_lost() -> None:
    """Six donors of 60 tokens each where four are allowed: 120 tokens are refused."""
    rng = np.random.default_rng(8)
    parts = [random_tokens(rng, 60) for _ in range(6)]
    requests = stream([*parts, joined([random_tokens(rng, 10), *parts])])
    steps = losses_of(requests, f"kvshare-fingerprints:{BOLD}")
    assert (steps["oracle"], steps["not_found"]) == (360, 0)
    assert (steps["generation"], steps["refused"]) == (0, -120)


def test_what_short_prompts_lose_is_told_apart() -> None:
    """Prompts of less than 32 tokens are not looked up: all that the oracle has of them is too short."""
    tokens = random_tokens(np.random.default_rng(9), 100)
    steps = losses_of(stream([tokens, tokens[40:65]]))
    assert (steps["not_found"], steps["too_short"], steps["hit"]) == (0, -25, 0)


def test_losses_can_be_left_unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all else is the same; and where no limit can have cost anything, nothing is planned again."""
    requests = stream(_variants_of_variants())
    arm = SharingPolicy(
        "arm", replace(policy_context(), explain_losses=False), sharing_options=SharingOptions("fingerprints")
    )
    unexplained = [arm.observe(one) for one in requests]
    arm.close()
    assert all(outcome.num_refused == 0 for outcome in unexplained)
    explained = run("kvshare-fingerprints", requests)
    assert [outcome.hits for outcome in unexplained] == [outcome.hits for outcome in explained]
    look = LossFinder(SharingOptions(), load_settings(), DeltaTree.open(None, identity=None).segment)
    monkeypatch.setattr(sharing_options, "make_plan", lambda *_, **__: pytest.fail("planned again"))
    rates = Rates.linear(prefill_tokens_per_s=1000.0, load_bytes_per_s=1e9)
    assert look.losses(requests[0].token_ids, NoPlan(Reason.NOTHING_IN_COMMON), (), rates) == (0, 0)


def test_requests_embedded_for_the_look_up_are_told() -> None:
    """Where meaning was asked: not for a prompt that is known already, and not for a short one."""
    tokens = random_tokens(np.random.default_rng(10), 600)
    requests = [request(i, one, text="some words") for i, one in enumerate((tokens, tokens, tokens[:40]))]
    outcomes = run("kvshare", requests, embeddings=True)
    assert [outcome.embedded for outcome in outcomes] == [True, False, False]


@pytest.mark.parametrize("capacity", [None, 5000])
@pytest.mark.parametrize("arm", [spec.text for spec in parse_policies("all")])
def test_namespaces_never_mix(arm: str, capacity: int | None) -> None:
    """The same prompt of two tenants is new to the second."""
    tokens = random_tokens(np.random.default_rng(3), 600)
    requests = [
        request(0, tokens, answer=tokens[:50], namespace="a", text="some text"),
        request(1, tokens, namespace="b", text="some text"),
        request(2, tokens, namespace="a", text="some text"),
    ]
    _, foreign, own = run(arm, requests, capacity, embeddings=True)
    assert not foreign.hits
    assert not foreign.false_hit
    assert not foreign.answered
    assert bool(own.hits) == (arm != "nothing")


@pytest.mark.parametrize(
    "arm",
    ["prefix", "chunks", "response", "kvshare-fingerprints", "oracle"],
)
def test_finite_stores_stay_within_their_bytes(arm: str) -> None:
    """No arm's store holds more than its capacity; the chunks' engine has its prefix cache beside it."""
    rng = np.random.default_rng(4)
    requests = [request(i, random_tokens(rng, 400), text=f"word{i}") for i in range(12)]
    allowed = 2 if arm == "chunks" else 1
    outcomes = run(arm, requests, 1000, embeddings=True)
    assert all(outcome.num_stored_bytes <= allowed * 1000 * 10 for outcome in outcomes)
    assert outcomes[-1].num_stored_bytes > 0


@pytest.mark.parametrize(("moved", "stays"), [(True, True), (False, False)])
def test_what_was_copied_for_another_text_stays_longer(moved: bool, stays: bool) -> None:
    """It outlives newer prompts that never come back. An equal prefix is no merit: what follows it has it."""
    rng = np.random.default_rng(5)
    document, head = random_tokens(rng, 300), random_tokens(rng, 20)
    user = [*head, *document] if moved else [*document, *head]
    others = [random_tokens(rng, 300) for _ in range(3)]
    requests = stream([document, user, *others, document])
    *_, again = run("kvshare-fingerprints-open", requests, 1000)
    assert (again.num_hit > 250) == stays


def test_it_leaves_in_the_end() -> None:
    """What nobody has copied from since leaves when all newer ones have."""
    rng = np.random.default_rng(5)
    document, head = random_tokens(rng, 300), random_tokens(rng, 20)
    others = [random_tokens(rng, 300) for _ in range(9)]
    requests = stream([document, [*head, *document], *others, document])
    *_, again = run("kvshare-fingerprints-open", requests, 1000)
    assert again.num_hit == 0


ASKERS = [
    (("u", "a"), ("u", "b"), False),
    (("u", "a"), ("v", "b"), True),
    (("u", "a"), ("v", "a"), True),
    ((None, "a"), (None, "a"), False),
    ((None, "a"), ("u", "a"), False),
    ((None, "a"), (None, "b"), None),
    (("u", "a"), (None, "b"), None),
]


@pytest.mark.parametrize(("donor", "own", "is_other"), ASKERS)
@pytest.mark.parametrize("arm", ["prefix", "chunks", "response", "kvshare-fingerprints", "oracle"])
def test_another_user_is_one_that_the_log_names(
    arm: str, donor: tuple[str | None, str], own: tuple[str | None, str], is_other: bool | None
) -> None:
    """A conversation has one user; of two conversations without names nothing is claimed."""
    tokens = random_tokens(np.random.default_rng(10), 600)
    requests = []
    for one, (user, conversation) in zip(stream([tokens] * 2, text="words"), (donor, own), strict=True):
        requests.append(replace(one, logged=replace(one.logged, user=user, conversation=conversation)))
    outcome = run(arm, requests, embeddings=True)[1]
    assert outcome.num_hit > 0
    assert outcome.cross_user is is_other


@pytest.mark.parametrize(
    ("answers", "expected"),
    [([], False), ([False, None], None), ([None, True], True), ([False], False)],
)
def test_one_that_is_known_is_enough(answers: list[bool | None], expected: bool | None) -> None:
    """Among several donors."""
    assert any_of(answers) is expected


def test_evicted_prompts_are_no_donors() -> None:
    """What left the finite kvshare store is not found; what stayed is."""
    rng = np.random.default_rng(5)
    first, second = random_tokens(rng, 500), random_tokens(rng, 500)
    again = [*first[:250], 1, *first[251:]]
    assert run("kvshare-fingerprints-open", stream([first, again]), 700)[-1].num_hit > 400
    assert run("kvshare-fingerprints-open", stream([first, second, again]), 500)[-1].num_hit == 0


def test_two_kvshare_arms_with_one_seed_agree() -> None:
    """Ids are drawn with the seed, so ties break the same way."""
    rng = np.random.default_rng(6)
    base = random_tokens(rng, 400)
    requests = []
    for index in range(30):
        tokens = list(base)
        place = int(rng.integers(0, 390))
        tokens[place : place + 3] = random_tokens(rng, 4)
        requests.append(request(index, tokens))
    first, second = (
        [replace(o, lookup_s=0, plan_s=0) for o in run("kvshare-fingerprints", requests)] for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize(
    "text", ["", "nonsense", "prefix:colour=3", "prefix:block_size=x", "prefix:block_size=0"]
)
def test_wrong_arms_are_refused(text: str) -> None:
    """With the setting's name."""
    with pytest.raises(ConfigError, match="--arms"):
        parse_policies(text)


def test_arms_have_their_options() -> None:
    """Options reach the arm and the results; aliases give each arm once."""
    (spec,) = parse_policies("kvshare-fingerprints:min_run=32")
    arm: CachePolicy = make_policy(spec, policy_context())
    assert arm.options["min_run"] == 32
    assert arm.name == "kvshare-fingerprints:min_run=32"
    arm.close()
    names = [one.text for one in parse_policies("fast,prefix")]
    assert len(names) == len(set(names))
    oracles = [make_policy(one, policy_context()) for one in parse_policies("oracle,oracle:tail=1")]
    assert [oracle.options for oracle in oracles] == [{"min_run": 16}, {"min_run": 16, "tail": 1}]
