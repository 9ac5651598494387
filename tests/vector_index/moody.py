"""An index and an embedder that fail as they are told."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vector_index import (
    EmbedderError,
    Entry,
    Hit,
    IndexUnavailableError,
    Nominator,
    NominatorSettings,
    PromptText,
    VectorIndex,
)
from vector_index.base import Vector, VectorName

TEXT = PromptText("weather", "weather")
SETTINGS = NominatorSettings(
    search_timeout_s=1.0,  # a busy machine may take a part of a second from anybody
    embed_timeout_s=1.0,
    write_timeout_s=2.0,
    failures_to_open=3,
    open_s=30,
    max_distance=0.5,
)
SHORT = replace(SETTINGS, search_timeout_s=0.02)


class MoodyIndex(VectorIndex):
    """An index in a dictionary that works, fails, or hangs, as its `mood` says."""

    mood = "works"
    num_good_calls = 10**9

    def __init__(self) -> None:
        super().__init__(SETTINGS.schema(MoodyEmbedder()))
        self.entries: dict[int, Entry] = {}
        self.num_calls = 0

    async def _mood(self) -> None:
        self.num_calls += 1
        if self.mood == "fails":
            raise IndexUnavailableError("connection refused")
        if self.mood == "surprises":
            raise RuntimeError("a bug")
        if self.mood == "blocks":  # as a native call does that holds the GIL
            time.sleep(2 * SHORT.search_timeout_s)  # noqa: ASYNC251  this is the point
        self.num_good_calls -= 1
        if self.mood == "hangs" or self.num_good_calls < 0:
            await asyncio.sleep(60)

    async def open(self) -> None:
        await self._mood()

    async def close(self) -> None:
        await self._mood()

    async def recreate(self) -> None:
        await self._mood()
        self.entries.clear()

    async def upsert(self, entries: Sequence[Entry]) -> None:
        await self._mood()
        self.entries |= {entry.prompt_id: entry for entry in entries}

    async def delete(self, namespace: str, prompt_ids: Sequence[int]) -> None:
        await self._mood()
        for prompt_id in prompt_ids:
            self.entries.pop(prompt_id, None)

    async def _nearest(
        self, namespace: str, name: VectorName, vector: Vector, *, limit: int, min_score: float | None
    ) -> list[tuple[object, Hit]]:
        await self._mood()
        own = [entry for entry in self.entries.values() if entry.namespace == namespace]
        if name == "sparse":
            shared = [float(len(np.intersect1d(entry.fingerprints, vector))) for entry in own]
        else:
            shared = [float(entry.embedding is not None) for entry in own]
        hits = [Hit(entry.prompt_id, score) for entry, score in zip(own, shared, strict=True) if score]
        return [(namespace, hit) for hit in hits[:limit]]

    async def count(self, namespace: str | None = None) -> int:
        await self._mood()
        return len(self.entries)

    async def maintain(self) -> None:
        await self._mood()


class MoodyEmbedder:
    """An embedder that works, fails, hangs, or returns nonsense, as its `mood` says."""

    name = "moody"
    dimension = 2

    def __init__(self) -> None:
        self.mood = "works"
        self.go_on = threading.Event()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if self.mood == "fails":
            raise EmbedderError("no weights")
        if self.mood == "quotes":
            raise ValueError(texts[0])
        if self.mood == "hangs":
            self.go_on.wait(60)
        value = np.nan if self.mood == "nonsense" else 2**-0.5
        return np.full((len(texts), 2), value, dtype=np.float32)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tokens(seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 30_000, 600, dtype=np.int32)


class Setup:
    """A nominator over moody parts, with one prompt stored."""

    def __init__(self, settings: NominatorSettings = SETTINGS) -> None:
        self.index = MoodyIndex()
        self.embedder = MoodyEmbedder()
        self.clock = Clock()
        self.nominator = Nominator(self.index, embedder=self.embedder, settings=settings, clock=self.clock)
