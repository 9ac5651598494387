"""The suite that every backend passes."""

import numpy as np
import pytest
from numpy.typing import NDArray

from vector_index import Entry, Hit, IndexSchemaError, IndexUnavailableError, VectorIndex


def prints(*values: int) -> NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


def direction(*values: float) -> NDArray[np.float32]:
    vector = np.zeros(8, dtype=np.float32)
    vector[: len(values)] = values
    return vector / np.linalg.norm(vector)


async def test_a_search_by_fingerprints_counts_the_shared_ones(index: VectorIndex) -> None:
    """The score of a hit is how many of the asked fingerprints it has, the largest first."""
    await index.upsert([Entry(1, "a", prints(1, 2, 3)), Entry(2, "a", prints(2, 3, 4, 2**32 - 1))])
    hits = await index.search_fingerprints("a", prints(3, 4, 9, 2**32 - 1), 10)
    assert hits == [Hit(2, 3.0), Hit(1, 1.0)]


async def test_a_prompt_that_shares_nothing_is_no_hit(index: VectorIndex) -> None:
    """Only prompts with at least one asked fingerprint are returned."""
    await index.upsert([Entry(1, "a", prints(1, 2))])
    assert await index.search_fingerprints("a", prints(3), 10) == []


async def test_no_fingerprints_find_nothing(index: VectorIndex) -> None:
    """A prompt too short for fingerprints can be stored and searched for without harm."""
    await index.upsert([Entry(1, "a", prints())])
    assert await index.search_fingerprints("a", prints(), 10) == []
    assert await index.count("a") == 1


async def test_the_limit_keeps_the_best_hits(index: VectorIndex) -> None:
    """No more than `limit` hits come back, and they are the ones that share most."""
    await index.upsert([Entry(i, "a", prints(*range(i + 1))) for i in range(10)])
    hits = await index.search_fingerprints("a", prints(*range(10)), 3)
    assert [hit.prompt_id for hit in hits] == [9, 8, 7]


async def test_a_search_by_embedding_keeps_the_distance(index: VectorIndex) -> None:
    """Only prompts within the cosine distance are hits, scored by cosine similarity."""
    near, far = direction(1.0, 0.1), direction(0.1, 1.0)
    await index.upsert([Entry(1, "a", prints(1), near), Entry(2, "a", prints(1), far)])
    hits = await index.search_embedding("a", direction(1.0), 10, 0.05)
    assert [hit.prompt_id for hit in hits] == [1]
    assert hits[0].score == pytest.approx(float(near @ direction(1.0)), abs=1e-5)


async def test_a_prompt_without_embedding_is_found_by_fingerprints_only(
    index: VectorIndex,
) -> None:
    """An entry may lack its embedding, and then no search by meaning returns it."""
    await index.upsert([Entry(1, "a", prints(1))])
    assert await index.search_embedding("a", direction(1.0), 10, 2.0) == []
    assert [hit.prompt_id for hit in await index.search_fingerprints("a", prints(1), 10)] == [1]


async def test_upsert_replaces_the_entry_as_a_whole(index: VectorIndex) -> None:
    """Storing an id again replaces fingerprints and embedding, also by nothing."""
    await index.upsert([Entry(1, "a", prints(1), direction(1.0))])
    await index.upsert([Entry(1, "a", prints(2))])
    assert await index.search_fingerprints("a", prints(1), 10) == []
    assert await index.search_fingerprints("a", prints(2), 10) == [Hit(1, 1.0)]
    assert await index.search_embedding("a", direction(1.0), 10, 2.0) == []
    assert await index.count() == 1


async def test_namespaces_do_not_see_each_other(index: VectorIndex) -> None:
    """The same prompt in two namespaces is found in its own and never in the other."""
    same = prints(1, 2, 3)
    await index.upsert([Entry(1, "a", same, direction(1.0)), Entry(2, "b", same, direction(1.0))])
    for namespace, owner in (("a", 1), ("b", 2)):
        by_prints = await index.search_fingerprints(namespace, same, 10)
        by_meaning = await index.search_embedding(namespace, direction(1.0), 10, 0.5)
        assert [hit.prompt_id for hit in by_prints] == [owner]
        assert [hit.prompt_id for hit in by_meaning] == [owner]
    assert await index.search_fingerprints("c", same, 10) == []
    assert index.foreign_hits == 0


@pytest.mark.parametrize("other", ["A", "a ", "", "a*", "a\x00", "ab"])
async def test_a_namespace_is_compared_exactly(index: VectorIndex, other: str) -> None:
    """A namespace that merely looks alike finds nothing."""
    await index.upsert([Entry(1, "a", prints(1))])
    assert await index.search_fingerprints(other, prints(1), 10) == []
    assert await index.count(other) == 0


async def test_delete_forgets_only_own_prompts(index: VectorIndex) -> None:
    """Deleting an id that another namespace owns leaves it there; an own id is gone."""
    await index.upsert([Entry(i, "a", prints(1)) for i in (1, 2)] + [Entry(3, "b", prints(1))])
    await index.delete("a", [1, 3, 99])
    assert [hit.prompt_id for hit in await index.search_fingerprints("a", prints(1), 10)] == [2]
    assert [hit.prompt_id for hit in await index.search_fingerprints("b", prints(1), 10)] == [3]


async def test_recreating_leaves_an_empty_usable_index(index: VectorIndex) -> None:
    """Afterwards nothing is stored and new prompts can be."""
    await index.upsert([Entry(1, "a", prints(1))])
    await index.recreate()
    assert await index.count() == 0
    await index.upsert([Entry(2, "a", prints(1))])
    assert await index.search_fingerprints("a", prints(1), 10) == [Hit(2, 1.0)]


async def test_many_entries_go_in_at_once(index: VectorIndex) -> None:
    """A batch larger than any internal slice is stored in full, and maintenance keeps it."""
    await index.upsert([Entry(i, "a", prints(i, 1000)) for i in range(150)])
    await index.maintain()
    assert await index.count("a") == 150
    assert (await index.search_fingerprints("a", prints(149), 10))[0].prompt_id == 149


async def test_a_closed_index_is_unavailable(index: VectorIndex) -> None:
    """After close every call raises IndexUnavailableError, and closing again is harmless."""
    await index.close()
    await index.close()
    with pytest.raises(IndexUnavailableError):
        await index.search_fingerprints("a", prints(1), 10)
    with pytest.raises(IndexUnavailableError):
        await index.upsert([Entry(1, "a", prints(1))])
    with pytest.raises(IndexUnavailableError):
        await index.count()


async def test_unfit_entries_are_refused(index: VectorIndex) -> None:
    """A wrong dimension, NaN or a negative id raise, and nothing is stored."""
    with pytest.raises(IndexSchemaError):
        await index.upsert([Entry(1, "a", prints(1), np.ones(3, dtype=np.float32))])
    with pytest.raises(ValueError, match="finite"):
        await index.upsert([Entry(1, "a", prints(1), np.full(8, np.nan, dtype=np.float32))])
    with pytest.raises(ValueError, match="negative"):
        await index.upsert([Entry(-1, "a", prints(1))])
    assert await index.count() == 0


async def test_a_foreign_hit_is_dropped_and_counted(index: VectorIndex) -> None:
    """Should a backend ignore its filter, the hit of another namespace still goes no further."""
    hits = index.own_hits("a", [("a", Hit(1, 1.0)), ("b", Hit(2, 9.0)), (None, Hit(3, 9.0))])
    assert hits == [Hit(1, 1.0)]
    assert index.foreign_hits == 2
