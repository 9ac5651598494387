"""
The same stream sent to a running server: measured times to the first token, and what the server reports as
cached beside what the policies predict.

    OUT/live.json, OUT/live.parquet (a row per request, numbers only)

Requests are sent in the stream's order, at its pace (`speedup`) or as fast as `concurrency` allows; a turn
waits for the turn before it. Policies predict from prompts alone, because this server's answers are not the
log's. An interrupted run writes the files of the requests answered so far, with "complete" false.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from delta_tree import token_ids
from kvshare.errors import ConfigError
from kvshare.replay.live_client import Answered, connected
from kvshare.replay.live_figures import summarise
from kvshare.replay.options import ReplayOptions, Report, describe_log, describe_options, versions
from kvshare.replay.policies import BatchEmbeddings, open_policies
from kvshare.replay.requests import TokenizedRequest
from kvshare.replay.results import SCHEMA_VERSION, Document, Row
from kvshare.replay.tokens import RequestTokenizer
from kvshare.replay.whole_files import write_document

LIVE_FILE: Final = "live.json"
LIVE_REQUESTS_FILE: Final = "live.parquet"
LIVE_POLICIES: Final = "prefix,kvshare-fingerprints"
_NO_ANSWER: Final = token_ids([])

Predict = Callable[[TokenizedRequest], Awaitable[dict[str, int]]]  # -> tokens not computed, by policy


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """`speedup` None: without pauses; 1.0: at the log's own pace."""

    url: str
    key: str | None = None
    concurrency: int = 4
    speedup: float | None = None
    max_tokens: int = 8


def replay_live(
    options: ReplayOptions, live: LiveOptions, *, report: Report = lambda done, total: None
) -> Document:
    """
    Send the stream, write both files and return the document. `options.policies` predict. Ctrl-C ends it
    early and is raised only if nothing was answered yet.

    Raises:  ConfigError for several capacities; LogError, ModelError; UpstreamError if no server answers
    """
    if len(options.capacities_tokens) > 1:
        raise ConfigError("--capacity", "expected one store with --engine: predictions are for one server")
    with options.stream(report) as stream:
        tokenizer, embeddings = RequestTokenizer.load(options.tokenizer), options.embeddings()
        total, requests = len(stream), tokenizer.tokenize(stream)
        rows: list[Row] = []
        with _predicting(options, embeddings) as predict:
            complete = _run(_send_all(requests, live, predict, rows, lambda n: report(n, total)), rows)
        rows.sort(key=itemgetter("index"))
        wall_s = max((row["sent_s"] + row["seconds"] for row in rows), default=0.0)
        document: Document = {
            "schema_version": SCHEMA_VERSION,
            "kind": "replay-live",
            "complete": complete,
            "config": {
                **describe_options(options, tokenizer, embeddings),
                "concurrency": live.concurrency,
                "speedup": live.speedup,
                "max_tokens": live.max_tokens,
            },
            "data": describe_log(options, stream),
            **summarise(rows, [spec.text for spec in options.policies]),
            "requests_per_s": len(rows) / wall_s if wall_s else 0.0,
            "versions": versions(),
        }
    pq.write_table(pa.Table.from_pylist(rows), options.out / LIVE_REQUESTS_FILE)
    write_document(options.out / LIVE_FILE, document)
    return document


@contextmanager
def _predicting(options: ReplayOptions, embeddings: BatchEmbeddings | None) -> Iterator[Predict]:
    """The policies in a thread of their own: they have event loops, and planning must not delay requests."""
    capacity = next(iter(options.capacities_tokens), None)
    stores = ((spec, capacity) for spec in options.policies)
    opening, opened = open_policies(stores, options.context(embeddings)), ExitStack()

    def predict(request: TokenizedRequest) -> dict[str, int]:
        if embeddings is not None:
            embeddings.prepare([request])
        return {policy.name: policy.observe(request).num_hit for policy in policies}

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvshare-predict") as thread:
        try:
            policies = thread.submit(opened.enter_context, opening).result()
            yield lambda request: asyncio.get_running_loop().run_in_executor(thread, predict, request)
        finally:
            thread.submit(opened.close).result()


def _run(sending: Coroutine[Any, Any, None], rows: Sequence[Row]) -> bool:
    """Whether all was sent. Raises KeyboardInterrupt only if there are no rows yet."""
    try:
        asyncio.run(sending)
    except KeyboardInterrupt:
        if not rows:
            raise
        return False
    return True


class Pace:
    """When requests are due: at the log's distances, counted from the first request that has a time."""

    def __init__(self, speedup: float) -> None:
        self._speedup = speedup
        self._start: tuple[float, float] | None = None  # by the clock, and by the log

    def wait_s(self, request: TokenizedRequest, now_s: float) -> float:
        """How long a request has to wait; requests before the first time do not wait."""
        if self._start is None:
            if request.logged.time_s is None:
                return 0.0
            self._start = now_s, request.time_s
        began_s, first_s = self._start
        return max(0.0, began_s + (request.time_s - first_s) / self._speedup - now_s)


async def _send_all(
    requests: Iterator[TokenizedRequest],
    live: LiveOptions,
    predict: Predict,
    rows: list[Row],
    done: Callable[[int], None],
) -> None:
    """Adds a row for each answer as it comes, so that they are there after an interruption."""
    async with connected(live.url, key=live.key) as client:
        model = await client.model()
        slots, began = asyncio.Semaphore(live.concurrency), time.perf_counter()
        latest: dict[str, asyncio.Task[None]] = {}  # of each conversation
        pace = None if live.speedup is None else Pace(live.speedup)

        async def send(
            request: TokenizedRequest, predicted: dict[str, int], before: asyncio.Task[None] | None
        ) -> None:
            try:
                if before is not None:
                    await asyncio.wait([before])
                sent_s = time.perf_counter() - began
                answered = await client.ask(*request_body(request, model, live.max_tokens))
                rows.append(_row(request, answered, predicted, sent_s=sent_s))
                done(len(rows))
            finally:
                slots.release()
                if latest.get(request.logged.conversation) is asyncio.current_task():
                    del latest[request.logged.conversation]

        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                predicted = await predict(replace(request, answer_ids=_NO_ANSWER))
                if pace is not None:
                    await asyncio.sleep(pace.wait_s(request, time.perf_counter()))
                await slots.acquire()
                before = latest.get(request.logged.conversation)
                task = tasks.create_task(send(request, predicted, before))
                latest[request.logged.conversation] = task


def request_body(request: TokenizedRequest, model: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """The route, and the body as the log had it; token ids where it had no text."""
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
    sources, details = usage.get("kvshare") or {}, usage.get("prompt_tokens_details") or {}
    return {
        "index": request.index,
        "sent_s": sent_s,
        "ttft_s": answered.ttft_s,
        "seconds": answered.seconds,
        "num_messages": len(request.logged.messages or ()),
        "num_tokens": request.num_tokens,
        "num_prompt_tokens": usage.get("prompt_tokens"),
        "num_cached": details.get("cached_tokens"),
        "num_exact": sources.get("exact"),
        "num_copied": sources.get("copied"),
        "error": answered.error,
        **{f"predicted:{name}": num_hit for name, num_hit in predicted.items()},
    }
