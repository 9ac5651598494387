"""
The driver of a replay: the stream goes past all arms, each on its own; rows, figures and files come out.

Nothing in a figure depends on a clock or on chance outside the seed: two runs give the same `results.json`,
its "times" aside, and so does a run that was interrupted and resumed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from kvshare.replay import results as schema
from kvshare.replay.arms import Arm, ArmSpec, Meanings, opened_arms
from kvshare.replay.counts import COUNT_EDGES, Buckets, DataSummary
from kvshare.replay.measures import Measures
from kvshare.replay.options import (
    ReplayOptions,
    Report,
    config_document,
    describe_files,
    make_bench,
    make_meanings,
    make_stream,
    versions,
)
from kvshare.replay.requests import TokenizedRequest, batches
from kvshare.replay.results import REQUESTS_FILE, RESULTS_FILE, Document, Row, write_document
from kvshare.replay.rows import Checkpoint, Progress, RowMaker, make_row
from kvshare.replay.stream import RequestStream
from kvshare.replay.tokens import RequestTokenizer
from vector_index import TextEmbedder

_BATCH = 32  # requests embedded together


def replay(
    options: ReplayOptions,
    *,
    resume: bool = False,
    embedder: TextEmbedder | None = None,
    report: Report = lambda done, total: None,
) -> Document:
    """
    Replay the files and write `results.json` and `requests.parquet`; returns the former.

    `embedder` is asked only if an arm needs it; None is the bundled one.
    Raises:  LogError, ModelError
    """
    with make_stream(options, report) as stream:
        tokenizer, meanings = RequestTokenizer.load(options.tokenizer), make_meanings(options, embedder)
        answers = any(spec.name == "response" for spec in options.arms)
        bench = make_bench(options, meanings, light_ids=tokenizer.light_ids() if answers else frozenset())
        with opened_arms(_stores(options), bench) as arms:
            return _Run(options, stream, tokenizer, meanings, arms).complete(resume=resume, report=report)


class _Run:
    """One replay from its start, or its checkpoint, to its files."""

    def __init__(
        self,
        options: ReplayOptions,
        stream: RequestStream,
        tokenizer: RequestTokenizer,
        meanings: Meanings | None,
        arms: Sequence[Arm],
    ) -> None:
        self._options = options
        self._stream = stream
        self._tokenizer = tokenizer
        self._meanings = meanings
        self._files = describe_files(options.paths)
        self._config = config_document(options, tokenizer, meanings)
        self._arms = arms
        families = {arm.label: arm.family for arm in self._arms}
        self._measures = Measures(families, prefill_tokens_per_s=options.prefill_tokens_per_s)
        self._checkpoint = Checkpoint(options.out)
        self._pending: list[Row] = []
        self._data = DataSummary()
        self._started_at = datetime.now(UTC)
        self._began = time.perf_counter()

    def complete(self, *, resume: bool, report: Report) -> Document:
        """Observe everything, then write the files."""
        files = [file.model_dump() for file in self._files]
        name = _digest_of({"config": self._config, "files": files, "versions": versions()})
        progress = self._checkpoint.resume(name) if resume else self._checkpoint.begin(name)
        if progress.num_requests:
            progress = replace(progress, num_resumed=progress.num_resumed + 1)
            for rows in self._checkpoint.rows(progress):
                self._measures.add(rows)
        progress = self._observe_all(progress, report)
        document = self._results(progress).model_dump(mode="json")
        self._checkpoint.join(progress, self._options.out / REQUESTS_FILE)
        write_document(self._options.out / RESULTS_FILE, document)
        self._checkpoint.clear()
        return document

    def _observe_all(self, progress: Progress, report: Report) -> Progress:
        maker, num_measured = RowMaker(), progress.num_requests
        for batch in batches(self._tokenizer.tokenize(self._stream), _BATCH):
            if self._meanings is not None:
                self._meanings.prepare(batch)
            for request in batch:
                rows = self._observe(request, maker)
                if request.index >= progress.num_requests:
                    self._measures.add(rows)
                    self._pending += rows
                    num_measured = request.index + 1
                elif request.index + 1 == progress.num_requests:
                    self._checkpoint.check_same_data(progress, self._data.digest)
                report(request.index + 1, len(self._stream))
            if num_measured - progress.num_requests >= self._options.checkpoint_every:
                progress = self._save(progress, num_measured)
        return self._save(progress, num_measured)

    def _observe(self, request: TokenizedRequest, maker: RowMaker) -> list[Row]:
        common = maker.common(request)
        rows = []
        for arm in self._arms:
            began = time.perf_counter()
            outcome = arm.observe(request)
            rows.append(make_row(common, arm, outcome, observe_s=time.perf_counter() - began))
        self._data.add(request, common)
        return rows

    def _save(self, progress: Progress, num_measured: int) -> Progress:
        now = time.perf_counter()
        saved = replace(
            progress,
            num_requests=num_measured,
            num_parts=progress.num_parts + bool(self._pending),
            digest=self._data.digest,
            wall_s=progress.wall_s + now - self._began,
        )
        self._checkpoint.save(saved, self._pending)
        self._began, self._pending = now, []
        return saved

    def _results(self, progress: Progress) -> schema.Results:
        return schema.Results(
            config=self._config,
            data=self._data.data(self._files, self._stream.report.unreadable()),
            versions=versions(),
            arms=tuple(map(self._arm_results, self._arms)),
            similarity=self._measures.similarity(),
            waterfall=self._measures.waterfalls(),
            times=self._times(progress),
        )

    def _arm_results(self, arm: Arm) -> schema.ArmResults:
        capacity, tree = arm.capacity_tokens, arm.describe_tree()
        store = schema.Store(
            arm=arm.name,
            label=arm.label,
            family=arm.family,
            capacity_tokens=capacity,
            capacity_bytes=None if capacity is None else capacity * arm.bench.bytes_per_token,
            options=arm.options,
        )
        return self._measures.arms[arm.label].results(store, None if tree is None else _tree(tree))

    def _times(self, progress: Progress) -> schema.RunTimes:
        meanings = self._meanings
        embedding, embedding_s = None, 0.0
        if meanings is not None:
            embedding_s = meanings.seconds_per_text
            seconds, num_texts = meanings.seconds, meanings.num_texts
            rate = num_texts / (seconds or 1)
            embedding = schema.EmbeddingTimes(num_texts=num_texts, seconds=seconds, texts_per_s=rate)
        return schema.RunTimes(
            started_at=self._started_at.isoformat(timespec="seconds"),
            wall_s=progress.wall_s,
            requests_per_s=progress.num_requests / progress.wall_s if progress.wall_s else 0.0,
            resumed=progress.num_resumed,
            embedding=embedding,
            arms={label: arm.times(embedding_s=embedding_s) for label, arm in self._measures.arms.items()},
        )


def _tree(figures: Document) -> schema.Tree:
    """Of what an arm says of its tree: every node's depth, and its number of children."""
    depth, children = (Buckets(COUNT_EDGES, figures.pop(name)).histogram() for name in ("depths", "children"))
    return schema.Tree(depth=depth, children=children, **figures)


def _stores(options: ReplayOptions) -> Iterator[tuple[ArmSpec, int | None]]:
    for spec in options.arms:
        yield spec, None
        if spec.name != "nothing":
            yield from ((spec, capacity) for capacity in options.capacities_tokens)


def _digest_of(document: Document) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
