"""What the nominator nominates, in which order, and that it keeps to the namespace."""

import numpy as np
import pytest

from tests.vector_index.topics import SETTINGS, TopicEmbedder, ids, tokens
from vector_index import (
    Candidate,
    Nominator,
    PromptRecord,
    PromptText,
    QdrantEdgeIndex,
)

WEATHER, SPORT = PromptText("weather", "weather"), PromptText("sport", "sport")


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
