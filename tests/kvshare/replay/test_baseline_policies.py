"""The policies that KVShare is compared with: prefix, oracle, chunks, response."""

import itertools
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvshare.replay.policies import make_policy, parse_policies
from kvshare.replay.requests import Outcome
from tests.kvshare.replay.policy_runs import run
from tests.kvshare.replay.synthetic import policy_context, random_tokens, request, stream

BLOCK = 16
few_tokens = st.lists(st.integers(0, 1), max_size=90)
prompts = st.lists(st.tuples(few_tokens, few_tokens), max_size=8)


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
