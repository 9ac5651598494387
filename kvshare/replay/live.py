"""
The same stream against a running server: real times to the first token, the plans' predictions beside what
the server says has happened.

    OUT/live.json, OUT/live.parquet (a row a request, numbers only)

Requests go out in the stream's order, paced by its times (`speedup`) or as fast as `concurrency` lets them; a
turn waits for the turn before it. Arms predict from prompts alone: the log's answers are not what this server
says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from delta_tree import token_ids
from kvshare.replay.arms import Arm, Meanings, Workbench, make_arm
from kvshare.replay.documents import write_document
from kvshare.replay.live_client import Answered, LiveClient, connected
from kvshare.replay.live_figures import summarise
from kvshare.replay.options import ReplayOptions, Report, make_meanings
from kvshare.replay.requests import TokenizedRequest
from kvshare.replay.results import SCHEMA_VERSION, Document, Row
from kvshare.replay.stream import RequestStream
from kvshare.replay.summary import describe_files, versions
from kvshare.replay.tokens import RequestTokenizer

LIVE_FILE: Final = "live.json"
LIVE_REQUESTS_FILE: Final = "live.parquet"
LIVE_ARMS: Final = "prefix,kvshare-fingerprints"
_NO_ANSWER: Final = token_ids([])


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """`speedup` None: as fast as possible; 1.0: at the log's own pace."""

    url: str
    key: str | None = None
    concurrency: int = 4
    speedup: float | None = None
    max_tokens: int = 8


def replay_live(
    options: ReplayOptions, live: LiveOptions, *, report: Report = lambda done, total: None
) -> Document:
    """
    Send the stream, write both files; returns the document. `options.arms` predict.

    Raises:  LogError, ModelError; UpstreamError if nobody answers
    """
    with RequestStream(
        options.paths, format_name=options.format_name, interleave=options.interleave, seed=options.seed
    ) as stream:
        tokenizer = RequestTokenizer.load(options.tokenizer)
        total = min(len(stream), options.limit) if options.limit else len(stream)
        requests = tokenizer.tokenize(islice(stream.requests(), total))
        with _Predictor(options) as predictor:
            rows, wall_s = asyncio.run(_send_all(requests, live, predictor, lambda n: report(n, total)))
        config = {
            "arms": [spec.text for spec in options.arms],
            "concurrency": live.concurrency,
            "speedup": live.speedup,
            "max_tokens": live.max_tokens,
            "limit": options.limit,
            "seed": options.seed,
            "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.digest},
        }
        document: Document = {
            "schema_version": SCHEMA_VERSION,
            "kind": "replay-live",
            "config": config,
            "data": {"files": describe_files(options.paths), "unreadable": stream.report.to_dict()},
            **summarise(rows, [spec.text for spec in options.arms]),
            "requests_per_s": len(rows) / wall_s if wall_s else 0.0,
            "versions": versions(),
        }
    pq.write_table(pa.Table.from_pylist(rows), options.out / LIVE_REQUESTS_FILE)
    write_document(options.out / LIVE_FILE, document)
    return document


class _Predictor:
    """Arms in a thread of their own: they have event loops, and planning must not hold up the sending."""

    def __init__(self, options: ReplayOptions) -> None:
        self._options = options
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvshare-predict")
        self._meanings: Meanings | None = None
        self._arms: list[Arm] = []

    def __enter__(self) -> _Predictor:
        self._thread.submit(self._open).result()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._close).result()
        self._thread.shutdown()

    async def predict(self, request: TokenizedRequest) -> dict[str, int]:
        """Tokens not computed, by arm."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._predict, request)

    def _open(self) -> None:
        options = self._options
        self._meanings = make_meanings(options, None)
        bench = Workbench(
            settings=options.settings,
            bytes_per_token=options.bytes_per_token,
            prefill_tokens_per_s=options.prefill_tokens_per_s,
            seed=options.seed,
            meanings=self._meanings,
        )
        capacity = next(iter(options.capacities_tokens), None)
        self._arms = [make_arm(spec, bench, capacity) for spec in options.arms]

    def _close(self) -> None:
        for arm in self._arms:
            arm.close()

    def _predict(self, request: TokenizedRequest) -> dict[str, int]:
        if self._meanings is not None:
            self._meanings.prepare([request])
        return {arm.name: arm.observe(request).num_hit for arm in self._arms}


@dataclass(slots=True)
class _Sender:
    """Requests on their way, and their rows."""

    client: LiveClient
    model: str
    live: LiveOptions
    began: float
    slots: asyncio.Semaphore
    done: Callable[[int], None]
    rows: list[Row] = field(default_factory=list)
    latest: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # of each conversation

    def send(self, tasks: asyncio.TaskGroup, request: TokenizedRequest, predicted: dict[str, int]) -> None:
        """Takes over a slot that the caller has acquired."""
        before = self.latest.get(request.logged.conversation)
        task = tasks.create_task(self._send(request, predicted, before))
        self.latest[request.logged.conversation] = task
        task.add_done_callback(lambda ended: self._forget(request.logged.conversation, ended))

    async def _send(
        self, request: TokenizedRequest, predicted: dict[str, int], before: asyncio.Task[None] | None
    ) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            sent_s = time.perf_counter() - self.began
            answered = await self.client.ask(*request_body(request, self.model, self.live.max_tokens))
            self.rows.append(_row(request, answered, predicted, sent_s=sent_s))
            self.done(len(self.rows))
        finally:
            self.slots.release()

    def _forget(self, conversation: str, ended: asyncio.Task[None]) -> None:
        if self.latest.get(conversation) is ended:
            del self.latest[conversation]


async def _send_all(
    requests: Iterator[TokenizedRequest],
    live: LiveOptions,
    predictor: _Predictor,
    done: Callable[[int], None],
) -> tuple[list[Row], float]:
    async with connected(live.url, key=live.key) as client:
        began = time.perf_counter()
        slots = asyncio.Semaphore(live.concurrency)
        sender = _Sender(client, await client.model(), live, began, slots, done)
        first_s: float | None = None
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                predicted = await predictor.predict(replace(request, answer_ids=_NO_ANSWER))
                first_s = request.time_s if first_s is None else first_s
                if live.speedup is not None:
                    due = began + (request.time_s - first_s) / live.speedup
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                await slots.acquire()
                sender.send(tasks, request, predicted)
    return sorted(sender.rows, key=lambda row: row["index"]), time.perf_counter() - began


def request_body(request: TokenizedRequest, model: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """The route, and the body as the log had it; tokens where it had no text."""
    logged = request.logged
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if logged.messages is not None:
        return "v1/chat/completions", {**body, "messages": [dict(message) for message in logged.messages]}
    prompt = logged.prompt if logged.prompt is not None else request.token_ids.tolist()
    return "v1/completions", {**body, "prompt": prompt}


def _row(request: TokenizedRequest, answered: Answered, predicted: dict[str, int], *, sent_s: float) -> Row:
    usage = answered.usage
    told = usage.get("kvshare") or {}
    details = usage.get("prompt_tokens_details") or {}
    return {
        "index": request.index,
        "sent_s": sent_s,
        "ttft_s": answered.ttft_s,
        "seconds": answered.seconds,
        "num_tokens": request.num_tokens,
        "num_prompt_tokens": usage.get("prompt_tokens"),
        "num_cached": details.get("cached_tokens"),
        "num_exact": told.get("exact"),
        "num_copied": told.get("copied"),
        "error": answered.error,
        **{f"predicted:{name}": num_hit for name, num_hit in predicted.items()},
    }
