"""
The source paper's figures 2 and 4 on a log of one's own (KVShare, arXiv:2503.16525).

Figure 2: the share of conversations whose first prompt has an identical or similar earlier one, similar being
a cosine distance of at most 0.05. Figure 4: of the "Similar" subset (duplicates taken out, then only prompts
kept that have another similar one), how much of each prompt need not be computed, as it is replayed in its
order.

    OUT/paper.json           the document below; figure-2 and figure-4 beside it, as .svg and .png
    {"schema_version", "kind": "replay-paper", "config", "data",
     "figure_2": {"num_prompts", "max_distance", "shares": {"identical", "similar", "unique"},
                  "by_distance": [{"distance", "share"}]}        share: identical or so near
     "figure_4": {"num_prompts", "num_duplicates", "num_tokens",
                  "arms": [{"arm", "token_hit_rate", "edges", "shares", "at_least": {"50", "70", "90"}}]},
     "paper": what the paper reports, "versions", "times"}

A log's first prompts stand for its conversations. Distances depend on the embedder: the paper's is GTE.
Every first prompt is compared with all before it: 100,000 take a minute and a half of one core and 150 MB
for 384 floats each, a million two and a half hours and 1.5 GB; embedding them takes longer.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvshare.errors import LogError
from kvshare.replay.arms import ArmSpec, Meanings, opened_arms
from kvshare.replay.arms.base import with_room
from kvshare.replay.counts import DISTANCE_THRESHOLDS, buckets
from kvshare.replay.options import (
    ReplayOptions,
    Report,
    bundled_embedder,
    config_document,
    data_document,
    make_bench,
    make_stream,
    versions,
)
from kvshare.replay.report.shapes import draw_figure_2, draw_figure_4
from kvshare.replay.requests import TokenizedRequest, batches
from kvshare.replay.results import SCHEMA_VERSION, SHARES, Document
from kvshare.replay.tokens import RequestTokenizer
from kvshare.replay.whole_files import write_document, write_whole
from vector_index import TextEmbedder

PAPER_FILE: Final = "paper.json"
MAX_DISTANCE: Final = 0.05  # one of `DISTANCE_THRESHOLDS`
PAPER_ARMS: Final = "prefix,chunks,kvshare,kvshare-open,kvshare-semantic,kvshare-semantic-open,oracle"
_EDGES: Final = tuple(share / 10 for share in range(10))
_BATCH: Final = 32
_REPORTED: Final = {
    "figure_2": {"WildChat-1M": {"identical_or_similar": 0.36}},
    "figure_4": {
        "WildChat-Similar": {"at_least_90": 0.6},
        "ShareGPT-Similar": {"at_least_90": 0.5},
        "LMSYSChat-Similar": {"at_least_90": 0.2},
    },
}


def replay_paper(
    options: ReplayOptions,
    *,
    embedder: TextEmbedder | None = None,
    report: Report = lambda done, total: None,
) -> Document:
    """
    Both figures, as a document and drawn, into `options.out`. `options.arms` are figure 4's.

    The log is read twice: what is reported is requests of both passes.

    Raises:  LogError, ModelError
    """
    began = time.perf_counter()
    with make_stream(options, report) as stream:
        tokenizer = RequestTokenizer.load(options.tokenizer)
        total = len(stream)
        meanings = Meanings(embedder or bundled_embedder(options))

        def first_turns(base: int) -> Iterator[list[TokenizedRequest]]:
            """In batches, each reported once it is dealt with."""
            requests = (one for one in tokenizer.tokenize(stream) if one.logged.turn == 0)
            for batch in batches(requests, _BATCH):
                yield batch
                report(base + batch[-1].index + 1, 2 * total)

        nearness = _Nearness()
        for batch in first_turns(0):
            meanings.prepare(batch)
            nearness.add([(request, meanings.of(request)) for request in batch])
        if not nearness.num_prompts:
            raise LogError("--paper: the log has no first turns, or does not say which requests are")
        chosen = nearness.similar
        subset = ([request for request in batch if request.index in chosen] for batch in first_turns(total))
        figure_4 = _figure_4(subset, options, meanings)
        report(2 * total, 2 * total)
        config = config_document(options, tokenizer, meanings)
    document: Document = {
        "schema_version": SCHEMA_VERSION,
        "kind": "replay-paper",
        "config": {name: config[name] for name in ("arms", "embedder", "limit", "seed", "tokenizer")},
        "data": data_document(options, stream),
        "figure_2": nearness.figure_2(),
        "figure_4": {"num_prompts": len(chosen), "num_duplicates": nearness.num_identical, **figure_4},
        "paper": _REPORTED,
        "versions": versions(),
        "times": {"wall_s": time.perf_counter() - began},
    }
    _write(options.out, document)
    return document


def _write(out: Path, document: Document) -> None:
    write_document(out / PAPER_FILE, document)
    for name, draw in (("figure_2", draw_figure_2), ("figure_4", draw_figure_4)):
        path, picture = out / f"{name.replace('_', '-')}.svg", draw(document[name], _REPORTED[name])
        write_whole(path, picture.svg.encode())
        write_whole(path.with_suffix(".png"), picture.png)


Vector = NDArray[np.float32]


class _Shelf:
    """One namespace's different prompts: their vectors, and where in the stream they stand."""

    def __init__(self, dimension: int) -> None:
        self.indexes: list[int] = []
        self._vectors = np.empty((64, dimension), np.float32)

    def add(self, indexes: Sequence[int], vectors: Sequence[Vector]) -> Iterator[tuple[int, Vector]]:
        """Each of these prompts, with its distances to all before it, in the order of `self.indexes`."""
        before = len(self.indexes)
        self.indexes += indexes
        self._vectors = with_room(self._vectors, len(self.indexes))
        self._vectors[before : len(self.indexes)] = vectors
        # One product for all of them: one for each reads all vectors again, and takes several times as long.
        products = self._vectors[before : len(self.indexes)] @ self._vectors[: len(self.indexes)].T
        for row, (index, likenesses) in enumerate(zip(indexes, products, strict=True)):
            yield index, np.maximum(1.0 - likenesses[: before + row], 0.0)


class _Nearness:
    """How near each prompt's nearest earlier one is, and who has a near one on either side."""

    def __init__(self) -> None:
        self.num_identical = 0
        self.similar: set[int] = set()  # places in the stream of the "Similar" subset
        self._distances: list[float] = []  # of the prompts that are no duplicates; 2.0: none before
        self._seen: set[bytes] = set()
        self._shelves: dict[str, _Shelf] = {}

    def add(self, prompts: Iterable[tuple[TokenizedRequest, Vector | None]]) -> None:
        """The stream's next prompts, each with its meaning."""
        placed: defaultdict[str, dict[int, Vector]] = defaultdict(dict)
        for request, vector in prompts:
            if self._is_identical(request):
                self.num_identical += 1
            elif vector is None:
                self._distances.append(2.0)
            else:
                placed[request.logged.namespace][request.index] = vector
        for namespace, own in placed.items():
            self._compare(namespace, list(own), list(own.values()))

    def _is_identical(self, request: TokenizedRequest) -> bool:
        """To an earlier one of its namespace."""
        content = hashlib.sha256(request.logged.namespace.encode() + b"\0" + request.token_ids.tobytes())
        known = len(self._seen)
        self._seen.add(content.digest())
        return len(self._seen) == known

    def _compare(self, namespace: str, indexes: Sequence[int], vectors: Sequence[Vector]) -> None:
        shelf = self._shelves.setdefault(namespace, _Shelf(len(vectors[0])))
        for index, distances in shelf.add(indexes, vectors):
            self._distances.append(float(distances.min(initial=2.0)))
            near = np.flatnonzero(distances <= MAX_DISTANCE)
            if len(near):
                self.similar |= {index, *(shelf.indexes[row] for row in near)}

    @property
    def num_prompts(self) -> int:
        return self.num_identical + len(self._distances)

    def figure_2(self) -> Document:
        distances, num_prompts, identical = np.array(self._distances), self.num_prompts, self.num_identical
        within = {limit: identical + int((distances <= limit).sum()) for limit in DISTANCE_THRESHOLDS}
        nums = {
            "identical": identical,
            "similar": within[MAX_DISTANCE] - identical,
            "unique": num_prompts - within[MAX_DISTANCE],
        }
        return {
            "num_prompts": num_prompts,
            "max_distance": MAX_DISTANCE,
            "shares": {name: num / num_prompts for name, num in nums.items()},
            "by_distance": [{"distance": limit, "share": num / num_prompts} for limit, num in within.items()],
        }


def _figure_4(
    subset: Iterable[list[TokenizedRequest]], options: ReplayOptions, meanings: Meanings
) -> Document:
    bench = make_bench(options, meanings, explain_losses=False)
    tokens: list[int] = []
    hits: list[list[int]] = []  # of each request, by arm
    with opened_arms(((spec, None) for spec in options.arms), bench) as arms:
        for batch in subset:
            meanings.prepare(batch)
            tokens += [request.num_tokens for request in batch]
            hits += [[arm.observe(request).num_hit for arm in arms] for request in batch]
    by_arm = np.array(hits, np.int64).reshape(-1, len(options.arms)).T
    return {
        "num_tokens": sum(tokens),
        "arms": [_distribution(spec, own, tokens) for spec, own in zip(options.arms, by_arm, strict=True)],
    }


def _distribution(spec: ArmSpec, hits: NDArray[np.int64], tokens: Sequence[int]) -> Document:
    """How the requests' hit rates are spread."""
    rates = hits / np.maximum(np.array(tokens, np.int64), 1)
    counts = np.bincount(buckets(_EDGES, rates), minlength=len(_EDGES))
    num = max(1, len(rates))
    return {
        "arm": spec.text,
        "token_hit_rate": int(hits.sum()) / max(1, sum(tokens)),
        "edges": list(_EDGES),
        "shares": [int(count) / num for count in counts],
        "at_least": {str(share): int((100 * rates >= share).sum()) / num for share in SHARES},
    }
