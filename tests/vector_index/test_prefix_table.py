"""The prefix table against a plain dictionary, and its memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vector_index.prefix_table import PrefixTable

BLOCK = 3


def tokens(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def common_blocks(left: list[int], right: list[int]) -> int:
    num_blocks = 0
    while (
        (end := (num_blocks + 1) * BLOCK) <= min(len(left), len(right))
        and left[:end] == right[:end]
    ):  # fmt: skip
        num_blocks += 1
    return num_blocks


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 8),
        st.lists(st.integers(0, 1), max_size=14),
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(steps, st.lists(st.integers(0, 1), max_size=14))
def test_the_table_equals_a_dictionary(
    history: list[tuple[str, str, int, list[int]]], query: list[int]
) -> None:
    """After any adds, replacements and removals the longest prefix is what a full scan finds."""
    table = PrefixTable(BLOCK, max_hits=100)
    stored: dict[tuple[str, int], list[int]] = {}
    for verb, namespace, prompt_id, values in history:
        key = (namespace, prompt_id)
        if verb == "add":
            table.add(namespace, prompt_id, tokens(values))
            stored[key] = values
        else:
            table.remove(namespace, prompt_id)
            stored.pop(key, None)
    for namespace in ("a", "b"):
        shared = {
            prompt_id: common_blocks(values, query)
            for (owner, prompt_id), values in stored.items()
            if owner == namespace
        }
        longest = max(shared.values(), default=0)
        hit = table.longest(namespace, tokens(query))
        assert {i for i in range(9) if table.contains(namespace, i)} == set(shared)
        if longest == 0:
            assert hit is None
        else:
            assert hit is not None
            assert hit.num_tokens == longest * BLOCK
            assert set(hit.prompt_ids) == {i for i, num in shared.items() if num == longest}
            assert all(table.shares(namespace, i, hit) == (shared[i] == longest) for i in shared)


def test_namespaces_do_not_see_each_other() -> None:
    """The same tokens are found in their own namespace and in no other."""
    table = PrefixTable(4)
    table.add("a", 1, tokens([7] * 8))
    assert table.longest("a", tokens([7] * 8)) is not None
    assert table.longest("b", tokens([7] * 8)) is None


def test_removing_one_of_two_equal_prompts_keeps_the_other() -> None:
    """Shared blocks belong to every prompt that has them."""
    table = PrefixTable(4)
    table.add("a", 1, tokens([7] * 8))
    table.add("a", 2, tokens([7] * 8))
    table.remove("a", 1)
    hit = table.longest("a", tokens([7] * 8 + [8]))
    assert hit is not None
    assert (hit.prompt_ids, hit.num_tokens) == ((2,), 8)


def test_hits_are_few_when_many_share_the_prefix() -> None:
    """A common system prompt gives `max_hits` prompts, not all of them."""
    table = PrefixTable(4, max_hits=3)
    for prompt_id in range(50):
        table.add("a", prompt_id, tokens([7] * 8 + [prompt_id] * 4))
    hit = table.longest("a", tokens([7] * 8 + [99] * 4))
    assert hit is not None
    assert len(hit.prompt_ids) == 3
    assert hit.num_tokens == 8


def test_a_prompt_of_2000_tokens_takes_less_than_a_kilobyte() -> None:
    """The table stays frugal: the target is 3 KB per 2,000-token prompt."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 30_000, 2000, dtype=np.int32) for _ in range(500)]
    table = PrefixTable(32)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for prompt_id, ids in enumerate(prompts):
        table.add("a", prompt_id, ids)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / len(prompts) < 1000


def test_a_block_size_below_one_is_refused() -> None:
    """Blocks have at least one token."""
    with pytest.raises(ValueError, match="block_size 0"):
        PrefixTable(0)


def test_prefixes_of_any_number_of_blocks_are_found_whole() -> None:
    """However far the digests of a long prompt are computed at once."""
    ids = np.random.default_rng(2).integers(0, 99, 4 * 300, dtype=np.int32)
    table = PrefixTable(4)
    table.add("a", 1, ids)
    for num_blocks in (1, 2, 63, 64, 65, 66, 129, 200, 300):
        other = ids.copy()
        other[4 * num_blocks :] += 1
        hit = table.longest("a", other)
        assert hit is not None
        assert hit.num_tokens == 4 * num_blocks
