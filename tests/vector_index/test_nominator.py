"""What the nominator nominates, in which order, and that it keeps to the namespace."""

from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from vector_index import (
    Candidate,
    Nomination,
    Nominator,
    NominatorSettings,
    PromptRecord,
    PromptText,
    QdrantEdgeIndex,
)

SETTINGS = NominatorSettings(
    block_size=16, max_distance=0.2, dense_min_tokens=100, search_timeout_s=5, embed_timeout_s=5
)
WEATHER, SPORT = PromptText("weather", "weather"), PromptText("sport", "sport")


class TopicEmbedder:
    """Knows two topics and counts how often it is asked."""

    name = "topics"
    dimension = 2

    def __init__(self) -> None:
        self.num_texts = 0

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.num_texts += len(texts)
        rows = [[1.0, 0.0] if "weather" in text else [0.0, 1.0] for text in texts]
        return np.array(rows, dtype=np.float32)


def tokens(seed: int, size: int = 400) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 30_000, size, dtype=np.int32)


def ids(nomination: Nomination) -> list[int]:
    assert nomination.failures == ()
    return [candidate.prompt_id for candidate in nomination.candidates]


@pytest.fixture
def embedder() -> TopicEmbedder:
    return TopicEmbedder()


@pytest.fixture
async def nominator(embedder: TopicEmbedder) -> AsyncIterator[Nominator]:
    index = QdrantEdgeIndex(SETTINGS.schema(embedder))
    await index.open()
    nominator = Nominator(index, embedder, SETTINGS)
    yield nominator
    nominator.close()
    await index.close()


async def test_an_empty_index_nominates_nothing(nominator: Nominator) -> None:
    """An empty namespace is no failure; an empty prompt neither."""
    assert ids(await nominator.nominate("a", tokens(1), WEATHER, allow_dense=True)) == []
    assert ids(await nominator.nominate("a", tokens(1, 0), None, allow_dense=True)) == []


async def test_the_same_prompt_is_nominated_by_prefix(nominator: Nominator) -> None:
    """A prompt sent again finds itself, with its whole blocks as known prefix."""
    assert await nominator.remember(1, "a", tokens(1)) == ()
    nomination = await nominator.nominate("a", tokens(1), None, allow_dense=False)
    (candidate,) = nomination.candidates
    assert "prefix" in candidate.sources
    assert candidate.score == pytest.approx(1.0)
    assert nomination.num_prefix_tokens == 400


async def test_a_passage_is_found_wherever_it_stands(nominator: Nominator) -> None:
    """A shared chunk at another position, without a shared prefix, nominates by fingerprint."""
    chunk = tokens(9, 200)
    await nominator.remember(1, "a", np.concatenate([tokens(1), chunk]))
    await nominator.remember(2, "a", tokens(2))
    query = np.concatenate([tokens(3, 50), chunk, tokens(4, 150)])
    nomination = await nominator.nominate("a", query, None, allow_dense=False)
    (candidate,) = nomination.candidates
    assert (candidate.prompt_id, candidate.sources) == (1, ("fingerprint",))
    assert candidate.score == pytest.approx(0.5, abs=0.2)


async def test_who_shares_prefix_and_rest_comes_first(nominator: Nominator) -> None:
    """Among many with the same system prompt, the donor of the rest is the first candidate."""
    system = tokens(0, 320)
    for prompt_id in range(1, 31):
        await nominator.remember(prompt_id, "a", np.concatenate([system, tokens(prompt_id)]))
    query = np.concatenate([system, tokens(7)])
    query[400] += 1
    nomination = await nominator.nominate("a", query, None, allow_dense=False)
    assert nomination.candidates[0].prompt_id == 7
    assert nomination.candidates[0].sources == ("prefix", "fingerprint")
    assert nomination.candidates[0].score > 0.8
    assert len(nomination.candidates) <= SETTINGS.max_candidates


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


async def test_meaning_is_asked_only_where_it_can_pay(nominator: Nominator, embedder: TopicEmbedder) -> None:
    """A covered, a short or an unpermitted prompt is not embedded; an open long one is."""
    await nominator.remember(1, "a", tokens(1), WEATHER)
    embedder.num_texts = 0
    await nominator.nominate("a", tokens(1), WEATHER, allow_dense=True)
    await nominator.nominate("a", tokens(2, 99), WEATHER, allow_dense=True)
    await nominator.nominate("a", tokens(2), WEATHER, allow_dense=False)
    await nominator.nominate("a", tokens(2), None, allow_dense=True)
    assert embedder.num_texts == 0
    nomination = await nominator.nominate("a", tokens(2), WEATHER, allow_dense=True)
    assert embedder.num_texts == 1
    (candidate,) = nomination.candidates
    assert (candidate.prompt_id, candidate.sources, candidate.score) == (1, ("embedding",), 0.0)
    assert candidate.similarity == pytest.approx(1.0)
    assert set(nomination.stage_seconds) == {"prefix", "fingerprint", "embedding"}


async def test_far_meanings_are_not_nominated(nominator: Nominator) -> None:
    """Beyond the distance nothing is nominated."""
    await nominator.remember(1, "a", tokens(1), SPORT)
    assert ids(await nominator.nominate("a", tokens(2), WEATHER, allow_dense=True)) == []


async def test_meaning_gets_a_place_beside_many_passages(nominator: Nominator) -> None:
    """A quarter of the places is kept for candidates by meaning alone."""
    chunk = tokens(0, 60)
    for n in range(20):
        await nominator.remember(n, "a", np.concatenate([tokens(100 + n), chunk]), SPORT)
    await nominator.remember(99, "a", tokens(99), WEATHER)
    query = np.concatenate([tokens(3), chunk])
    found = ids(await nominator.nominate("a", query, WEATHER, allow_dense=True))
    assert len(found) == SETTINGS.max_candidates
    assert 99 in found


async def test_namespaces_do_not_see_each_other(nominator: Nominator) -> None:
    """The same prompt is nominated in its namespace and by no stage in another."""
    await nominator.remember(1, "a", tokens(1), WEATHER)
    query = tokens(1)
    query[0] += 1  # no prefix, so that fingerprints and meaning are asked too
    for namespace, expected in (("a", [1]), ("b", []), ("A", []), ("", [])):
        for asked in (tokens(1), query, tokens(2)):
            nomination = await nominator.nominate(namespace, asked, WEATHER, allow_dense=True)
            assert ids(nomination) == expected


async def test_forgotten_prompts_are_not_nominated(nominator: Nominator) -> None:
    """Forgetting prompts of a namespace removes them from every stage, and no other prompt."""
    for prompt_id, namespace in ((1, "a"), (2, "a"), (3, "b")):
        await nominator.remember(prompt_id, namespace, tokens(1), WEATHER)
    assert await nominator.forget("a", [1, 3]) == ()
    assert ids(await nominator.nominate("a", tokens(1), None, allow_dense=False)) == [2]
    assert ids(await nominator.nominate("b", tokens(1), None, allow_dense=False)) == [3]
    assert await nominator.forget("a", [2]) == ()
    for asked in (tokens(1), tokens(2)):
        assert ids(await nominator.nominate("a", asked, WEATHER, allow_dense=True)) == []
        assert ids(await nominator.nominate("b", asked, WEATHER, allow_dense=True)) == [3]


def records() -> list[PromptRecord]:
    """Forty prompts; each chunk is in three of a namespace, and a few have a text."""
    return [
        PromptRecord(
            n,
            "ab"[n % 2],
            np.concatenate([tokens(n), tokens(1000 + n // 6, 120)]),
            WEATHER if n % 20 == 0 else None,
        )
        for n in range(40)
    ]


async def answers(nominator: Nominator) -> list[set[Candidate]]:
    queries = [np.concatenate([tokens(500), record.token_ids[50:]]) for record in records()[::7]]
    queries += [tokens(900), records()[5].token_ids]
    return [
        set((await nominator.nominate(namespace, query, WEATHER, allow_dense=True)).candidates)
        for query in queries
        for namespace in "ab"
    ]


async def test_an_index_filled_again_answers_like_the_original(
    nominator: Nominator, embedder: TopicEmbedder
) -> None:
    """The same records give the same candidates, however many come at once."""
    assert await nominator.remember_all(records(), batch_size=7) == ()
    before = await answers(nominator)
    assert sum(map(len, before)) > 20
    index = QdrantEdgeIndex(SETTINGS.schema(embedder))
    await index.open()
    again = Nominator(index, embedder, SETTINGS)
    assert await again.remember_all(records()) == ()
    assert await answers(again) == before
    await again.remember(1000, "a", tokens(900), WEATHER)
    assert await answers(again) != before
    again.close()
    await index.close()


async def test_remembering_again_changes_the_prompt(nominator: Nominator) -> None:
    """An id that is remembered with other tokens is found by those and no longer by the old."""
    await nominator.remember(1, "a", tokens(1))
    await nominator.remember(1, "a", tokens(2))
    assert ids(await nominator.nominate("a", tokens(1), None, allow_dense=False)) == []
    assert ids(await nominator.nominate("a", tokens(2), None, allow_dense=False)) == [1]
