"""The oracle: by hand, against all that could be kept, and never below a policy of eviction."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tree import EVICTION_QUEUES
from kvshare.replay.policies import make_policy, parse_policies
from kvshare.replay.policies.sharing import SharingPolicy
from kvshare.replay.policies.weightless_stack import WeightlessStack
from kvshare_lab.bench.block_cache import BlockCache
from kvshare_lab.bench.oracle_cache import RequestBlocks, best_hits, blocks_of
from tests.kvshare.replay.synthetic import policy_context, random_tokens, request


def _stream(text: str) -> list[RequestBlocks]:
    """Requests of one block each, named by a letter."""
    return [RequestBlocks([letter.encode()], 1) for letter in text]


def test_by_hand() -> None:
    """With room for one, a stays all the time; with room for two, c is not kept, as it never comes again."""
    assert best_hits(_stream("abacab"), 1) == 2
    assert best_hits(_stream("aab"), 1) == 1
    assert best_hits(_stream("abacab"), 2) == 3
    assert best_hits(_stream("abacbc"), 2) == 3, "a leaves, as it never comes again"
    chain = [
        RequestBlocks([b"a", b"b", b"c"], 3),
        RequestBlocks([b"x"], 1),
        RequestBlocks([b"a", b"b", b"c"], 2),
    ]
    assert best_hits(chain, 3) == 2, "what the prompt may not reuse is no hit"
    assert best_hits(chain, 1) == 1, "the beginning stays"


@settings(max_examples=60, deadline=None)
@given(st.text("abcd", max_size=8), st.integers(1, 3))
def test_nothing_does_better(text: str, capacity: int) -> None:
    """Than the best of all ways to keep letters."""

    def best(position: int, held: frozenset[str]) -> int:
        if position == len(text):
            return 0
        letter = text[position]
        after = held | {letter}
        kept = [
            frozenset(each) for size in range(capacity + 1) for each in itertools.combinations(after, size)
        ]
        return (letter in held) + max(best(position + 1, each) for each in kept)

    assert best_hits(_stream(text), capacity) == best(0, frozenset())


@pytest.mark.parametrize("policy", sorted(EVICTION_QUEUES))
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_does_better(policy: str, seed: int, tmp_path: Path) -> None:
    """On small traces of chats, with room for a third of them: counted in tokens."""
    rng = np.random.default_rng(seed)
    chats = [random_tokens(rng, 64) for _ in range(8)]
    requests = []
    for index in range(40):
        number = int(rng.integers(0, len(chats)))
        requests.append(
            request(index, chats[number], answer=random_tokens(rng, 8), conversation=f"c{number}")
        )
        chats[number] = [*chats[number], *requests[-1].answer_ids.tolist(), *random_tokens(rng, 40)]
    (spec,) = parse_policies("kvshare-exact")
    context = policy_context()
    blocks = blocks_of(requests, 1)
    room = len({digest for each in blocks for digest in each.digests}) // 3
    stack = WeightlessStack(room * 5, room * 10, EVICTION_QUEUES[policy]())
    arm = make_policy(spec, context, stack=stack, eviction=policy)
    assert isinstance(arm, SharingPolicy)
    try:
        exact = sum(arm.observe(one).num_exact for one in requests)
    finally:
        arm.close()
    assert 0 < exact <= best_hits(blocks, room)


@pytest.mark.parametrize("policy", sorted(EVICTION_QUEUES))
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=30), st.integers(1, 12))
def test_a_cache_of_blocks_is_never_above_the_oracle(
    policy: str, asked: list[tuple[int, int]], capacity: int
) -> None:
    """Chats that have a beginning in common, of any lengths; and with room for all it is as good."""
    stream = [
        RequestBlocks([b"common", *(b"%d %d" % (chat, place) for place in range(length))], length + 1)
        for chat, length in asked
    ]
    cache = BlockCache(EVICTION_QUEUES[policy], capacity)
    assert cache.hits(stream) <= best_hits(stream, capacity)
    assert len(cache._holders) <= capacity
    assert BlockCache(EVICTION_QUEUES[policy], 1000).hits(stream) == best_hits(stream, 1000)
