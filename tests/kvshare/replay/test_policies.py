"""Each arm reuses exactly what it says, and nothing of another namespace."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tree import DeltaTree
from kvshare.errors import ConfigError
from kvshare.logs.requests import any_of
from kvshare.reasons import Reason
from kvshare.replay.measures import waterfalls
from kvshare.replay.policies import make_policy, parse_policies, sharing_options
from kvshare.replay.policies.base import CachePolicy
from kvshare.replay.policies.sharing import SharingPolicy
from kvshare.replay.policies.sharing_options import LossFinder, SharingOptions
from kvshare.replay.requests import Outcome, TokenizedRequest
from kvshare.replay.rows import SCHEMA, RowMaker, make_row
from kvshare.settings import load_settings
from kvshare.sharing.cost import Rates
from kvshare.sharing.plan import NoPlan
from tests.kvshare.replay.synthetic import policy_context, random_tokens, request, stream

BLOCK = 16

few_tokens = st.lists(st.integers(0, 1), max_size=90)
prompts = st.lists(st.tuples(few_tokens, few_tokens), max_size=8)


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


def positions(outcome: Outcome) -> set[int]:
    return {position for span in outcome.hits for position in range(span.start, span.end)}


@given(prompts)
def test_prefix_equals_brute_force(pairs: list[tuple[list[int], list[int]]]) -> None:
    """The longest whole-block prefix of any earlier prompt with its answer, never the last token."""
    requests = [request(i, prompt, answer=answer) for i, (prompt, answer) in enumerate(pairs)]
    seen: list[list[int]] = []
    for one, outcome in zip(requests, run("prefix", requests), strict=True):
        prompt = one.token_ids.tolist()
        common = max((_common_blocks(prompt, earlier) for earlier in seen), default=0)
        expected = min(common, max(0, len(prompt) - 1) // BLOCK) * BLOCK
        assert outcome.num_hit == outcome.num_exact == expected
        seen.append(prompt + one.answer_ids.tolist())


def _common_blocks(a: list[int], b: list[int]) -> int:
    whole = min(len(a), len(b)) // BLOCK
    return next(
        (i for i in range(whole) if a[i * BLOCK : (i + 1) * BLOCK] != b[i * BLOCK : (i + 1) * BLOCK]), whole
    )


class NaivePool:
    """vLLM's block pool in a list: front is evicted first."""

    def __init__(self, num_blocks: int) -> None:
        self.queue = [SimpleNamespace(key=None) for _ in range(num_blocks)]

    def serve(self, prompt: list[int], answer: list[int]) -> int:
        tokens = prompt + answer
        needed = -(-len(tokens) // BLOCK)
        keys = [tuple(tokens[: (i + 1) * BLOCK]) for i in range(len(tokens) // BLOCK)]
        used = []
        for key in keys[: max(0, len(prompt) - 1) // BLOCK]:
            block = self._oldest(key)
            if block is None:
                break
            used.append(block)
        num_hit = len(used)
        if needed > len(self.queue):
            return num_hit
        for block in used:
            self.queue.remove(block)
        for place in range(num_hit, needed):
            block = self.queue.pop(0)
            block.key = keys[place] if place < len(keys) else None
            block.since = next(_ticks)
            used.append(block)
        for block in reversed(used):
            if block.key is None:
                self.queue.insert(0, block)
            else:
                self.queue.append(block)
        return num_hit

    def _oldest(self, key: tuple[int, ...]) -> SimpleNamespace | None:
        """Of equal blocks, vLLM takes the one cached first."""
        return min((b for b in self.queue if b.key == key), key=lambda b: b.since, default=None)


_ticks = itertools.count()


@given(prompts, st.integers(1, 12))
def test_finite_prefix_evicts_as_vllm_does(pairs: list[tuple[list[int], list[int]]], num_blocks: int) -> None:
    """Block by block the same as a naive model of vLLM's queue."""
    requests = [request(i, prompt, answer=answer) for i, (prompt, answer) in enumerate(pairs)]
    pool = NaivePool(num_blocks)
    for (prompt, answer), outcome in zip(pairs, run("prefix", requests, num_blocks * BLOCK), strict=True):
        assert outcome.num_hit == pool.serve(prompt, answer) * BLOCK
        assert outcome.num_stored_bytes <= num_blocks * BLOCK * 10


@given(prompts, st.integers(0, 3))
def test_oracle_equals_brute_force(pairs: list[tuple[list[int], list[int]]], tail: int) -> None:
    """Every token in a stretch of 16 before the tail that an earlier prompt or answer had, and no other."""
    requests = [request(i, prompt, answer=answer) for i, (prompt, answer) in enumerate(pairs)]
    seen: set[tuple[int, ...]] = set()
    arm = f"oracle:tail={tail}" if tail else "oracle"
    for one, outcome in zip(requests, run(arm, requests), strict=True):
        prompt = one.token_ids.tolist()
        starts = [i for i in range(len(prompt) - tail - 15) if tuple(prompt[i : i + 16]) in seen]
        assert positions(outcome) == {i + k for i in starts for k in range(16)}
        tokens = prompt + one.answer_ids.tolist()
        seen |= {tuple(tokens[i : i + 16]) for i in range(len(tokens) - 15)}


@given(prompts, st.integers(1, 120))
def test_finite_oracle_keeps_the_grams_used_last(
    pairs: list[tuple[list[int], list[int]]], capacity: int
) -> None:
    """An LRU over distinct 16-grams, by a list."""
    requests = [request(i, prompt, answer=answer) for i, (prompt, answer) in enumerate(pairs)]
    kept: list[tuple[int, ...]] = []
    for one, outcome in zip(requests, run("oracle", requests, capacity), strict=True):
        prompt = one.token_ids.tolist()
        starts = [i for i in range(len(prompt) - 15) if tuple(prompt[i : i + 16]) in kept]
        assert positions(outcome) == {i + k for i in starts for k in range(16)}
        tokens = prompt + one.answer_ids.tolist()
        for i in range(len(tokens) - 15):
            gram = tuple(tokens[i : i + 16])
            if gram in kept:
                kept.remove(gram)
            kept.append(gram)
        kept = kept[-capacity:]


def test_chunks_are_found_at_any_offset_and_only_whole() -> None:
    """A stored chunk of 256 serves wherever it stands; one changed token loses all of it."""
    rng = np.random.default_rng(0)
    stored = random_tokens(rng, 768)
    moved = [*random_tokens(rng, 37), *stored[256:512], *random_tokens(rng, 20)]
    broken = [*random_tokens(rng, 37), *stored[512:640], 7, *stored[641:768], *random_tokens(rng, 20)]
    outcomes = run("chunks", stream([stored, moved, broken]))
    assert positions(outcomes[1]) == set(range(37, 293))
    assert outcomes[1].shifts == (37 - 256,)
    assert not outcomes[2].hits


def test_chunks_leave_the_first_chunk_to_the_prefix() -> None:
    """As in LMCache: chunk 0 is no chunk of the blend; as a prefix it is reused in blocks of 16."""
    rng = np.random.default_rng(0)
    stored = random_tokens(rng, 300)
    outcomes = run("chunks", stream([stored, [5, *stored], stored[:260]]))
    assert not outcomes[1].hits
    assert positions(outcomes[2]) == set(range(256))


def test_finite_chunks_forget_the_least_recently_used() -> None:
    """With room for one chunk the second drives out the first."""
    rng = np.random.default_rng(0)
    first, second = random_tokens(rng, 512), random_tokens(rng, 512)
    moved = [9, *first[256:]]
    assert run("chunks", stream([first, moved]), 256)[-1].num_hit > 250
    assert run("chunks", stream([first, second, moved]), 256)[-1].num_hit == 0


def test_response_hits_are_false_where_content_differs() -> None:
    """Near texts get the cached answer; it is right only if the tokens that say something are equal."""
    bench = policy_context(embeddings=True, punctuation_ids=frozenset({99}))
    (spec,) = parse_policies("response:max_distance=0.3")
    arm = make_policy(spec, bench)
    text = "please enable two factor login for me"
    asked = request(0, [1, 2, 3], text=text)
    same = request(1, [1, 99, 2, 3, 99], text=text)
    other = request(2, [1, 2, 4], text=text.replace("enable", "disable"))
    far = request(3, [7, 8], text="quite another thing")
    first, right, wrong, nothing = (arm.observe(one) for one in (asked, same, other, far))
    assert not first.hits
    assert not first.false_hit
    assert positions(right) == set(range(5))
    assert not right.false_hit
    assert wrong.false_hit
    assert not wrong.hits
    assert wrong.answered
    assert not nothing.answered


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


BOLD = "max_deviation=9"  # in prompts as short as those below every move is far


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
    rates = Rates(prefill_tokens_per_s=1000.0, load_bytes_per_s=1e9)
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
