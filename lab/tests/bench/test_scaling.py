"""The benchmarks of many stored prompts run at a small size and give the keys that scripts read."""

import mmap
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from kvshare.errors import ConfigError
from kvshare.replay.policies.sharing_options import LossFinder
from kvshare_lab.bench import index, replay
from kvshare_lab.bench.figures import drop_from_page_cache, grown, memory_bytes, percentiles, shard_bytes
from kvshare_lab.bench.index import Corpus
from kvshare_lab.bench.text_like import as_text, common_words, text_like_prompts
from vector_index import Embedder


async def test_nominating_is_measured_as_written_cold_and_warm() -> None:
    """Nearly every query finds its donor, in the large namespace and in the small ones."""
    document = await index.run(stored=2000, queries=20)
    assert document["points"] == 2200
    assert set(document["nomination"]) == {"as_written", "cold", "warm"}
    for arm in document["nomination"].values():
        assert set(arm) == {"large", "small"}
        for kinds in arm.values():
            assert set(kinds) == {"prefix", "passage", "common", "unknown", "embedding"}
            for name, kind in kinds.items():
                assert kind["failures"] == 0
                assert kind["p99_ms"] >= kind["p50_ms"] > 0
                # A donor that shares little beside what all share may be one of many equals.
                assert kind["found"] < 0.5 if name == "unknown" else kind["found"] >= 0.8
    assert document["disk_bytes"]["total"] > document["disk_bytes"]["vector_storage-dense"] > 0
    assert set(document["memory_bytes"]) == {"built", "after_queries"}


async def test_an_index_without_meanings_is_measured_too() -> None:
    """Fingerprints only, and no small namespaces where a tenth is nothing."""
    document = await index.run(stored=9, queries=3, dense=False)
    assert document["dimension"] == 0
    assert set(document["nomination"]["warm"]) == {"large"}
    assert "embedding" not in document["nomination"]["warm"]["large"]


async def test_prompts_too_short_for_the_shared_passage_are_refused() -> None:
    """Head, passage and tail need room."""
    with pytest.raises(ConfigError, match="at least 192"):
        await index.run(stored=10, prompt_tokens=100)


def test_every_other_prompt_of_the_corpus_holds_the_passage() -> None:
    """Half of the prompts share it, and share nothing else."""
    corpus = Corpus(np.random.default_rng(0), 200, 10, dense=False)
    first, second, third = (record.token_ids for record in corpus.records(0, ["large"] * 3))
    assert np.array_equal(first[32:-64], third[32:-64])
    assert not np.array_equal(first[32:-64], second[32:-64])
    assert (first[:32] == third[:32]).mean() < 0.1


@pytest.mark.slow
def test_a_replay_is_measured_at_several_sizes() -> None:
    """A window after 1,000 requests and one at the end; much of the prompts is found again."""
    document = replay.run(stored=1200, requests=50, prompt_tokens=300)
    assert [window["stored"] for window in document["windows"]] == [1000, 1200]
    for window in document["windows"]:
        assert window["requests_per_s"] > 0
        assert 0.2 < window["hit_rate"] < 1
        assert window["plan"]["p99_ms"] >= window["plan"]["p50_ms"] > 0


def test_a_replay_is_measured_without_what_a_server_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks what the gates cost."""
    monkeypatch.setattr(LossFinder, "losses", lambda *_: pytest.fail("asked"))
    assert replay.run(stored=10, requests=5, prompt_tokens=100)["requests_per_s"] > 0


@pytest.mark.model
def test_a_replay_with_meanings_embeds_every_request() -> None:
    """The arm that looks at meaning runs as well."""
    document = replay.run(stored=20, requests=10, dense=True)
    assert document["embedded_texts_per_s"] > 0
    assert document["windows"][-1]["requests_per_s"] > 0


def test_prompts_like_text_repeat_passages_and_themselves() -> None:
    """Equal seeds give equal prompts; half hold the system prompt, some are rewritten earlier ones."""
    first, second = (text_like_prompts(np.random.default_rng(3), 300) for _ in range(2))
    drawn = list(islice(first, 100))
    assert all(np.array_equal(prompt, next(second)) for prompt in drawn)
    assert all(len(prompt) == 300 for prompt in drawn)
    system = max(drawn, key=lambda prompt: sum(np.array_equal(p[24:100], prompt[24:100]) for p in drawn))
    assert 30 < sum(np.array_equal(prompt[24:100], system[24:100]) for prompt in drawn) < 80
    near = sum((a == b).mean() > 0.85 for n, a in enumerate(drawn) for b in islice(drawn, n))
    assert near > 5
    words = [f"word{number}" for number in range(20_000)]
    assert as_text(drawn[0], words).split() == [words[token] for token in drawn[0][150:]]
    with pytest.raises(ConfigError, match="at least 64"):
        next(text_like_prompts(np.random.default_rng(3), 10))


@pytest.mark.model
def test_words_are_the_common_ones_of_the_embedder() -> None:
    """Its vocabulary is in the order of frequency; parts of words and signs are left out."""
    words = common_words(Embedder().load().vocabulary())
    assert len(set(words)) == 20_000
    assert set(words[:40]) > {"the", "of", "and"}
    assert not any("#" in word or "[" in word for word in words)
    with pytest.raises(ValueError, match="20000 English words, got 2"):
        common_words({"the": 7, "##ing": 8, "of": 9})


def test_percentiles_are_milliseconds() -> None:
    """Seconds come in, milliseconds go out."""
    found = percentiles([0.001] * 98 + [0.5, 1.0])
    assert (found["p50_ms"], found["p90_ms"], found["max_ms"]) == (1.0, 1.0, 1000.0)
    assert 1.0 < found["p99_ms"] < 1000.0


def test_memory_is_told_by_kind() -> None:
    """Pages written for the first time show up as the process's own memory."""
    before = memory_bytes()
    if before["RssAnon"] == 0:
        pytest.skip("this kernel does not count anonymous memory")
    # Straight from the kernel: an allocator may hand out memory that it never gave back.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as kept:
        kept.write(b"1" * len(kept))
        assert grown(before)["RssAnon"] > 32 << 20


def test_bytes_of_a_shard_are_told_by_part(tmp_path: Path) -> None:
    """Parts of all segments are added up; reading goes on after the page cache was dropped."""
    for name in (
        "segments/one/vectors/data",
        "segments/two/vectors/data",
        "segments/two/segment.json",
        "wal/0",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 10_000)
    drop_from_page_cache(tmp_path)
    sizes = shard_bytes(tmp_path)
    assert set(sizes) == {"vectors", "segment.json", "wal", "total"}
    assert sizes["vectors"] == 2 * sizes["wal"] >= 20_000
    assert sizes["total"] == sum(size for part, size in sizes.items() if part != "total")
    assert (tmp_path / "wal" / "0").read_bytes() == b"x" * 10_000
