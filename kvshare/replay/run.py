"""
The driver of a replay: the stream goes past all arms, each on its own; rows, figures and files come out.

Nothing in a figure depends on a clock or on chance outside the seed: two runs give the same `results.json`,
its "times" aside, and so does a run that was interrupted and resumed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice

from kvshare.errors import LogError
from kvshare.replay.arms import Arm, ArmSpec, Meanings, make_arm
from kvshare.replay.checkpoint import Checkpoint, Progress
from kvshare.replay.documents import arm_document, write_document
from kvshare.replay.measures import ArmMeasures, Measures
from kvshare.replay.options import (
    ReplayOptions,
    Report,
    config_document,
    make_bench,
    make_meanings,
    make_stream,
)
from kvshare.replay.requests import LoggedRequest, TokenizedRequest
from kvshare.replay.results import (
    REQUESTS_FILE,
    RESULTS_FILE,
    SCHEMA_VERSION,
    Document,
    Row,
    arm_label,
)
from kvshare.replay.rows import RowMaker, make_row
from kvshare.replay.stream import RequestStream
from kvshare.replay.summary import DataSummary, describe_files, versions
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
        run = _Run(
            options, stream, RequestTokenizer.load(options.tokenizer), make_meanings(options, embedder)
        )
        with run:
            return run.complete(resume=resume, report=report)


class _Run:
    """One replay from its start, or its checkpoint, to its files."""

    def __init__(
        self,
        options: ReplayOptions,
        stream: RequestStream,
        tokenizer: RequestTokenizer,
        meanings: Meanings | None,
    ) -> None:
        self._options = options
        self._stream = stream
        self._tokenizer = tokenizer
        self._meanings = meanings
        self._total = min(len(stream), options.limit) if options.limit else len(stream)
        self._files = describe_files(options.paths)
        self._config = config_document(options, tokenizer, meanings)
        self._stack = ExitStack()
        self._arms = [self._open_arm(spec, capacity) for spec, capacity in _stores(options)]
        families = {arm_label(arm.name, arm.capacity_tokens): arm.family for arm in self._arms}
        self._measures = Measures(families, prefill_tokens_per_s=options.prefill_tokens_per_s)
        self._checkpoint = Checkpoint(options.out)
        self._pending: list[Row] = []
        self._data = DataSummary()
        self._started_at = datetime.now(UTC)
        self._began = time.perf_counter()

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def complete(self, *, resume: bool, report: Report) -> Document:
        """Observe everything, then write the files."""
        name = _digest_of({"config": self._config, "files": self._files, "versions": versions()})
        progress = self._checkpoint.resume(name) if resume else self._checkpoint.begin(name)
        if progress.num_requests:
            progress = replace(progress, num_resumed=progress.num_resumed + 1)
            for rows in self._checkpoint.rows(progress):
                self._measures.add(rows)
        progress = self._observe_all(progress, report)
        document = self._document(progress)
        self._checkpoint.join(progress, self._options.out / REQUESTS_FILE)
        write_document(self._options.out / RESULTS_FILE, document)
        self._checkpoint.clear()
        return document

    def _observe_all(self, progress: Progress, report: Report) -> Progress:
        maker, num_measured = RowMaker(), progress.num_requests
        for batch in batches(self._requests(), _BATCH):
            if self._meanings is not None:
                self._meanings.prepare(batch)
            for request in batch:
                rows = self._observe(request, maker)
                if request.index >= progress.num_requests:
                    self._measures.add(rows)
                    self._pending += rows
                    num_measured = request.index + 1
                elif request.index + 1 == progress.num_requests:
                    self._check_same_data(progress)
                report(request.index + 1, self._total)
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

    def _requests(self) -> Iterator[TokenizedRequest]:
        logged: Iterable[LoggedRequest] = islice(self._stream.requests(), self._total)
        return self._tokenizer.tokenize(logged)

    def _check_same_data(self, progress: Progress) -> None:
        if self._data.digest != progress.digest:
            raise LogError("the log is another than the interrupted run's; start without --resume")

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

    def _open_arm(self, spec: ArmSpec, capacity: int | None) -> Arm:
        light_ids = self._tokenizer.light_ids() if spec.name == "response" else frozenset()
        bench = make_bench(self._options, self._meanings, light_ids=light_ids)
        arm = make_arm(spec, bench, capacity)
        self._stack.callback(arm.close)
        return arm

    def _document(self, progress: Progress) -> Document:
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "replay",
            "complete": True,
            "config": self._config,
            "data": {
                "files": self._files,
                **self._data.document(),
                "unreadable": self._stream.report.to_dict(),
            },
            "versions": versions(),
            "arms": [arm_document(arm, self._of(arm)) for arm in self._arms],
            "similarity": self._measures.similarity(),
            "waterfall": self._measures.waterfalls(),
            "times": self._times(progress),
        }

    def _of(self, arm: Arm) -> ArmMeasures:
        return self._measures.arms[arm_label(arm.name, arm.capacity_tokens)]

    def _times(self, progress: Progress) -> Document:
        meanings = self._meanings
        embedding, embedding_s = None, 0.0
        if meanings is not None:
            embedding_s = meanings.seconds_per_text
            seconds, num_texts = meanings.seconds, meanings.num_texts
            embedding = {
                "num_texts": num_texts,
                "seconds": seconds,
                "texts_per_s": num_texts / (seconds or 1),
            }
        return {
            "started_at": self._started_at.isoformat(timespec="seconds"),
            "wall_s": progress.wall_s,
            "requests_per_s": progress.num_requests / progress.wall_s if progress.wall_s else 0.0,
            "resumed": progress.num_resumed,
            "embedding": embedding,
            "arms": {label: arm.times(embedding_s=embedding_s) for label, arm in self._measures.arms.items()},
        }


def _stores(options: ReplayOptions) -> Iterator[tuple[ArmSpec, int | None]]:
    for spec in options.arms:
        yield spec, None
        if spec.name != "nothing":
            yield from ((spec, capacity) for capacity in options.capacities_tokens)


def batches(requests: Iterable[TokenizedRequest], size: int) -> Iterator[list[TokenizedRequest]]:
    """Up to `size` requests at a time: what is embedded together."""
    remaining = iter(requests)
    while batch := list(islice(remaining, size)):
        yield batch


def _digest_of(document: Document) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
