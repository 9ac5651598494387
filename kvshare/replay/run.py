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
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import numpy as np

from kvshare.replay import results as schema
from kvshare.replay.arms import Arm, ArmSpec, Meanings, opened_arms
from kvshare.replay.counts import COUNT_EDGES, histogram
from kvshare.replay.measures import arm_results, arm_times, describe_data, similarity, waterfalls
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
from kvshare.replay.results import REQUESTS_FILE, RESULTS_FILE, Document, Row
from kvshare.replay.rows import Checkpoint, Progress, RowMaker, make_row, read_arm
from kvshare.replay.stream import RequestStream
from kvshare.replay.tokens import RequestTokenizer
from kvshare.replay.whole_files import write_document
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


@dataclass(eq=False)
class _Run:
    """One replay from its start, or its checkpoint, to its files."""

    options: ReplayOptions
    stream: RequestStream
    tokenizer: RequestTokenizer
    meanings: Meanings | None
    arms: Sequence[Arm]

    def __post_init__(self) -> None:
        self._files = describe_files(self.options.paths)
        self._config = config_document(self.options, self.tokenizer, self.meanings)
        self._checkpoint = Checkpoint(self.options.out)
        self._pending: list[Row] = []
        self._hash = hashlib.sha256()  # of the data so far
        self._started_at = datetime.now(UTC)
        self._began = time.perf_counter()

    def complete(self, *, resume: bool, report: Report) -> Document:
        """Observe everything, then write the files."""
        files = [file.model_dump() for file in self._files]
        name = _digest_of({"config": self._config, "files": files, "versions": versions()})
        progress = self._checkpoint.resume(name) if resume else self._checkpoint.begin(name)
        if progress.num_requests:
            progress = replace(progress, num_resumed=progress.num_resumed + 1)
        progress = self._observe_all(progress, report)
        self._checkpoint.join(self.options.out / REQUESTS_FILE)
        document = self._results(progress).model_dump(mode="json")
        write_document(self.options.out / RESULTS_FILE, document)
        self._checkpoint.clear()
        return document

    def _observe_all(self, progress: Progress, report: Report) -> Progress:
        maker = RowMaker()
        for batch in batches(self.tokenizer.tokenize(self.stream), _BATCH):
            if self.meanings is not None:
                self.meanings.prepare(batch)
            for request in batch:
                rows, num_observed = self._observe(request, maker), request.index + 1
                if num_observed > progress.num_requests:
                    self._pending += rows
                elif num_observed == progress.num_requests:
                    self._checkpoint.check_same_data(progress, self._hash.hexdigest())
                report(num_observed, len(self.stream))
            if len(self._pending) >= self.options.checkpoint_every * len(self.arms):
                progress = self._save(progress)
        return self._save(progress)

    def _observe(self, request: TokenizedRequest, maker: RowMaker) -> list[Row]:
        common = maker.common(request)
        rows = []
        for arm in self.arms:
            began = time.perf_counter()
            outcome = arm.observe(request)
            rows.append(make_row(common, arm, outcome, observe_s=time.perf_counter() - began))
        self._hash.update(_content(request, common))
        return rows

    def _save(self, progress: Progress) -> Progress:
        now = time.perf_counter()
        saved = replace(
            progress,
            num_requests=progress.num_requests + len(self._pending) // len(self.arms),
            digest=self._hash.hexdigest(),
            wall_s=progress.wall_s + now - self._began,
        )
        if self._pending:
            self._checkpoint.save(saved, self._pending)
        self._began, self._pending = now, []
        return saved

    def _results(self, progress: Progress) -> schema.Results:
        """From the rows, one arm in memory at a time."""
        rows_of = partial(read_arm, self.options.out / REQUESTS_FILE)
        prefill, embedding_s = self.options.prefill_tokens_per_s, 0.0
        if self.meanings is not None:
            embedding_s = self.meanings.seconds_per_text
        arms, clocks = [], {}
        for arm in self.arms:
            rows = rows_of(arm.name, arm.capacity_tokens)
            arms.append(arm_results(rows, _store(arm), _tree(arm), prefill_tokens_per_s=prefill))
            clocks[arm.label] = arm_times(rows, prefill_tokens_per_s=prefill, embedding_s=embedding_s)
        families = {arm.name: arm.family for arm in self.arms if arm.capacity_tokens is None}
        return schema.Results(
            config=self._config,
            data=describe_data(
                rows_of(self.arms[0].name),
                sha256=self._hash.hexdigest(),
                files=self._files,
                unreadable=self.stream.report.unreadable(),
            ),
            versions=versions(),
            arms=tuple(arms),
            similarity=similarity(families, rows_of),
            waterfall=waterfalls(families, rows_of),
            times=self._times(progress, clocks),
        )

    def _times(self, progress: Progress, arms: dict[str, schema.ArmTimes]) -> schema.RunTimes:
        embedding = None
        if self.meanings is not None:
            seconds, num_texts = self.meanings.seconds, self.meanings.num_texts
            rate = num_texts / (seconds or 1)
            embedding = schema.EmbeddingTimes(num_texts=num_texts, seconds=seconds, texts_per_s=rate)
        return schema.RunTimes(
            started_at=self._started_at.isoformat(timespec="seconds"),
            wall_s=progress.wall_s,
            requests_per_s=progress.num_requests / progress.wall_s if progress.wall_s else 0.0,
            resumed=progress.num_resumed,
            embedding=embedding,
            arms=arms,
        )


def _content(request: TokenizedRequest, common: Row) -> bytes:
    """Everything that an arm's figures depend on, meaning aside; `common`: see rows.py."""
    user = 0 if common["user"] is None else common["user"] + 1
    names = (common["namespace"], user, common["conversation"])
    frame = np.array([*names, request.num_tokens, len(request.answer_ids)], "<i8")
    tokens = (ids.astype("<i4", copy=False) for ids in (request.token_ids, request.answer_ids))
    return b"".join(part.tobytes() for part in (frame, *tokens))


def _store(arm: Arm) -> schema.Store:
    capacity = arm.capacity_tokens
    return schema.Store(
        arm=arm.name,
        label=arm.label,
        family=arm.family,
        capacity_tokens=capacity,
        capacity_bytes=None if capacity is None else capacity * arm.bench.bytes_per_token,
        options=arm.options,
    )


def _tree(arm: Arm) -> schema.Tree | None:
    """Of what an arm says of its tree: every node's depth, and its number of children."""
    if (figures := arm.describe_tree()) is None:
        return None
    depth, children = (histogram(COUNT_EDGES, figures.pop(name)) for name in ("depths", "children"))
    return schema.Tree(depth=depth, children=children, **figures)


def _stores(options: ReplayOptions) -> Iterator[tuple[ArmSpec, int | None]]:
    for spec in options.arms:
        yield spec, None
        if spec.name != "nothing":
            yield from ((spec, capacity) for capacity in options.capacities_tokens)


def _digest_of(document: Document) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
