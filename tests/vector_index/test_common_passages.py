"""Passages that many stored prompts have: a few holders are found, and rare passages next to them."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.vector_index.topics import SETTINGS, TopicEmbedder, ids, tokens
from vector_index import (
    Nominator,
    NominatorSettings,
    QdrantEdgeIndex,
)


async def test_a_system_prompt_after_a_changing_header_still_nominates(
    embedder: TopicEmbedder,
) -> None:
    """Where everything shared is common to all, a prompt that has it is nominated all the same."""
    settings = NominatorSettings(max_postings=100, search_timeout_s=5)
    index = QdrantEdgeIndex(settings.schema(None))
    await index.open()
    nominator = Nominator(index, settings=settings)
    system = tokens(0)
    for n in range(60):
        own = [tokens(1000 + n, 40), system, tokens(2000 + n, 100)]
        await nominator.remember(n, "a", np.concatenate(own))
    query = np.concatenate([tokens(5, 40), system, tokens(6, 100)])
    nomination = await nominator.nominate("a", query, None, allow_dense=False)
    assert nomination.candidates
    assert nomination.candidates[0].score > 0.5
    nominator.close()
    await index.close()


@pytest.fixture
async def crowded() -> AsyncIterator[Nominator]:
    """At most three prompts hold a fingerprint, and a search asks for few common ones."""
    settings = NominatorSettings(max_holders=3, max_postings=2, search_timeout_s=5)
    index = QdrantEdgeIndex(settings.schema(None))
    await index.open()
    nominator = Nominator(index, settings=settings)
    yield nominator
    nominator.close()
    await index.close()


def with_system_prompt(seed: int) -> NDArray[np.int32]:
    """A header of its own, a common system prompt, a question of its own."""
    return np.concatenate([tokens(1000 + seed, 40), tokens(0), tokens(2000 + seed, 100)])


async def test_a_common_passage_is_stored_with_a_few_prompts(crowded: Nominator) -> None:
    """Its donors are found among those few; a rare passage is found in every prompt that has it."""
    for n in range(30):
        await crowded.remember(n, "a", with_system_prompt(n))
    by_common = ids(await crowded.nominate("a", with_system_prompt(77), None, allow_dense=False))
    assert by_common
    assert set(by_common) <= {0, 1, 2}
    query = np.concatenate([tokens(1), with_system_prompt(20)[-100:]])
    assert ids(await crowded.nominate("a", query, None, allow_dense=False)) == [20]


async def test_common_passages_are_found_behind_many_unknown_ones(crowded: Nominator) -> None:
    """Fingerprints that no prompt has are the rarest; they do not use up the search."""
    for n in range(10):
        await crowded.remember(n, "a", with_system_prompt(n))
    query = np.concatenate([tokens(5, 2000), tokens(0), tokens(6, 2000)])
    nomination = await crowded.nominate("a", query, None, allow_dense=False)
    assert nomination.candidates
    assert nomination.candidates[0].score == pytest.approx(400 / 4400, abs=0.05)


async def test_later_prompts_take_the_place_of_forgotten_holders(crowded: Nominator) -> None:
    """Where those stored with the common passage are forgotten, the next ones are."""
    for n in range(10):
        await crowded.remember(n, "a", with_system_prompt(n))
    await crowded.forget("a", [0, 1, 2])
    for n in range(10, 20):
        await crowded.remember(n, "a", with_system_prompt(n))
    found = ids(await crowded.nominate("a", with_system_prompt(77), None, allow_dense=False))
    assert found
    assert set(found) <= {10, 11, 12}


@pytest.mark.parametrize("seed", range(8))
async def test_every_known_passage_finds_a_donor(crowded: Nominator, seed: int) -> None:
    """However common: a prompt made of one known passage among new text nominates a donor of it."""
    rng = np.random.default_rng(seed)
    passages = [tokens(10_000 * seed + number, 60) for number in range(6)]
    owners: dict[int, set[int]] = {number: set() for number in range(6)}
    for n in range(40):
        chosen = np.flatnonzero(rng.random(6) < [0.9, 0.8, 0.5, 0.2, 0.1, 0.02])
        parts = [
            part for number in chosen for part in (tokens(int(rng.integers(10**9)), 30), passages[number])
        ]
        for number in chosen:
            owners[int(number)].add(n)
        await crowded.remember(n, "a", np.concatenate([tokens(10**6 + n, 20), *parts]))
    for number, passage in enumerate(passages):
        query = np.concatenate([tokens(int(rng.integers(10**9)), 90), passage])
        found = ids(await crowded.nominate("a", query, None, allow_dense=False))
        assert bool(found) == bool(owners[number])
        assert set(found) <= owners[number]


async def test_the_donor_of_a_rare_passage_is_not_crowded_out(nominator: Nominator) -> None:
    """Many prompts share the popular chunks; the only one with the rare chunk is kept too."""
    popular, rare = tokens(0, 300), tokens(1, 100)
    for n in range(30):
        await nominator.remember(n, "a", np.concatenate([tokens(100 + n, 90), popular]))
    await nominator.remember(50, "a", np.concatenate([tokens(200), rare]))
    query = np.concatenate([tokens(300, 60), rare, popular])
    found = ids(await nominator.nominate("a", query, None, allow_dense=False))
    assert len(found) == SETTINGS.max_candidates
    assert 50 in found
    assert found[0] != 50
