"""
The same stream sent to a running server: measured times to the first token, and what the server reports as
cached, compared with what the policies predict.

    OUT/live.json, OUT/live.parquet (a row per request, numbers only)

Requests are sent in the stream's order, at its pace (`speedup`) or as fast as `concurrency` allows; a turn
waits for the turn before it. Policies predict from prompts alone, because this server's answers are not the
log's. An interrupted run writes the files of the requests answered so far, with "complete" false. Shares are
of each side's own token count: the replay's for predictions, the server's for its reports.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from delta_tree import token_ids
from kvshare.errors import ConfigError
from kvshare.http_client import Answered, ask, served_model, session
from kvshare.replay.measures import milliseconds
from kvshare.replay.options import ReplayOptions, Report, describe_log, describe_options, versions
from kvshare.replay.policies import open_policies
from kvshare.replay.requests import TokenizedRequest
from kvshare.replay.results import SCHEMA_VERSION, Document, Row
from kvshare.replay.tokens import RequestTokenizer
from kvshare.replay.whole_files import write_document

LIVE_POLICIES: Final = "prefix,kvshare-fingerprints"
_NO_ANSWER: Final = token_ids([])
_SHARE_EDGES: Final = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 2.0)

# What a server's chat template may add to messages that were written without it, and leave out of them.
_MAX_PREAMBLE: Final = 32  # a default system prompt, a date
_MAX_MORE_PER_MESSAGE: Final = 8
_MAX_LESS_PER_MESSAGE: Final = 4
_MAX_OFF_PER_PROMPT: Final = 1  # the token of the beginning

Predict = Callable[[TokenizedRequest], dict[str, int]]  # -> tokens not computed, by policy


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
        tokenizer = RequestTokenizer.load(options.tokenizer)
        embeddings = options.embeddings(None) if options.embeds else None
        total, requests = len(stream), tokenizer.tokenize(stream)
        rows: list[Row] = []
        complete, capacities = True, options.capacities_tokens or (None,)
        with open_policies(options.policies, options.context(embeddings), capacities) as policies:

            def predict(request: TokenizedRequest) -> dict[str, int]:
                if embeddings is not None:
                    embeddings.prepare([request])
                return {policy.name: policy.observe(request).num_hit for policy in policies}

            try:
                asyncio.run(_send_all(requests, live, predict, rows, lambda n: report(n, total)))
            except KeyboardInterrupt:
                if not rows:
                    raise
                complete = False
        rows.sort(key=itemgetter("index"))
        sent = {name: getattr(live, name) for name in ("concurrency", "speedup", "max_tokens")}
        wall_s = max((row["sent_s"] + row["seconds"] for row in rows), default=0.0)
        document: Document = {
            "schema_version": SCHEMA_VERSION,
            "kind": "replay-live",
            "complete": complete,
            "config": describe_options(options, tokenizer, embeddings) | sent,
            "data": describe_log(options, stream),
            **summarise(rows, [spec.text for spec in options.policies]),
            "requests_per_s": len(rows) / wall_s if wall_s else 0.0,
            "versions": versions(),
        }
    pq.write_table(pa.Table.from_pylist(rows), options.out / "live.parquet")
    write_document(options.out / "live.json", document)
    return document


@dataclass(slots=True)
class Pace:
    """The times at which requests are due: at the log's distances from the first request that has a time."""

    speedup: float
    _start: tuple[float, float] | None = None  # by the clock, and by the log

    def wait_s(self, request: TokenizedRequest, now_s: float) -> float:
        """Return how long a request has to wait; requests before the first time do not wait."""
        if self._start is None:
            if request.logged.time_s is None:
                return 0.0
            self._start = now_s, request.time_s
        began_s, first_s = self._start
        return max(0.0, began_s + (request.time_s - first_s) / self.speedup - now_s)


async def _send_all(
    requests: Iterator[TokenizedRequest],
    live: LiveOptions,
    predict: Predict,
    rows: list[Row],
    done: Callable[[int], None],
) -> None:
    """Adds a row for each answer as it comes, so that they are there after an interruption."""
    url = live.url.rstrip("/").removesuffix("/v1") + "/"
    async with session(url, key=live.key) as client:
        model = await served_model(client, url)
        slots, began = asyncio.Semaphore(live.concurrency), time.perf_counter()
        turns = WeakValueDictionary[str, asyncio.Lock]()  # of each conversation, taken in order
        pace = None if live.speedup is None else Pace(live.speedup)

        async def send(request: TokenizedRequest, predicted: dict[str, int], turn: asyncio.Lock) -> None:
            try:
                async with turn:
                    sent_s = time.perf_counter() - began
                    answered = await ask(client, *request_body(request, model, live.max_tokens))
                    rows.append(_row(request, answered, predicted, sent_s=sent_s))
                    done(len(rows))
            finally:
                slots.release()

        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                # In a thread: policies have event loops, and planning must not delay requests.
                predicted = await asyncio.to_thread(predict, replace(request, answer_ids=_NO_ANSWER))
                if pace is not None:
                    await asyncio.sleep(pace.wait_s(request, time.perf_counter()))
                await slots.acquire()
                turn = turns.setdefault(request.logged.conversation, asyncio.Lock())
                tasks.create_task(send(request, predicted, turn))


def request_body(request: TokenizedRequest, model: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """Return the route, and the body as the log had it; token ids where it had no text."""
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


def summarise(rows: Sequence[Row], policies: Sequence[str]) -> Document:
    """Return the figures of `live.json`; `policies` predicted."""
    served = [row for row in rows if row["error"] is None]
    counted = [row for row in served if row["num_prompt_tokens"]]
    reported = [row for row in counted if row["num_cached"] is not None]
    shares = [row["num_cached"] / row["num_prompt_tokens"] for row in reported]
    num_prompt = sum(row["num_prompt_tokens"] for row in reported)
    num_cached = sum(row["num_cached"] for row in reported)
    by_share = []
    for low, high in pairwise(_SHARE_EDGES):
        some = [row for row, share in zip(reported, shares, strict=True) if low <= share < high]
        by_share.append({"from": low, **_ttft_ms(some), "num_requests": len(some)})
    return {
        "num_requests": len(rows),
        "num_failed": len(rows) - len(served),
        "errors": dict(sorted(Counter(row["error"] for row in rows if row["error"]).items())),
        "ttft_ms": _ttft_ms(served),
        "ttft_ms_by_cached_share": by_share,
        "reported": {
            "num_requests": len(reported),
            "num_prompt_tokens": num_prompt,
            "num_cached_tokens": num_cached,
            "token_hit_rate": num_cached / max(1, num_prompt),
        },
        "token_counts": {  # as counted here and by the server
            "num_requests": len(counted),
            "here": sum(row["num_tokens"] for row in counted),
            "server": sum(row["num_prompt_tokens"] for row in counted),
            "num_unlike": sum(map(_is_unlike, counted)),
        },
        "predicted": [_agreement(reported, shares, policy) for policy in policies],
    }


def _is_unlike(row: Row) -> bool:
    """Return whether a chat template does not explain how far the two counts of its prompt differ."""
    more, num_messages = row["num_prompt_tokens"] - row["num_tokens"], row["num_messages"]
    if not num_messages:
        return bool(abs(more) > _MAX_OFF_PER_PROMPT)
    most = _MAX_PREAMBLE + _MAX_MORE_PER_MESSAGE * num_messages
    return not -_MAX_LESS_PER_MESSAGE * num_messages <= more <= most


def _agreement(reported: Sequence[Row], shares: Sequence[float], policy: str) -> Document:
    """Return a policy's predictions against what the server reported (`shares`), for the same requests."""
    hits = np.array([row[f"predicted:{policy}"] for row in reported], np.int64)
    tokens = np.array([row["num_tokens"] for row in reported], np.int64)
    off = np.abs(hits / np.maximum(1, tokens) - np.array(shares))
    num = max(1, len(reported))
    return {
        "arm": policy,
        "token_hit_rate": int(hits.sum()) / max(1, int(tokens.sum())),
        "mean_difference": float(off.sum()) / num,
        "within_5_percent": int((off <= 0.05).sum()) / num,
    }


def _ttft_ms(rows: Sequence[Row]) -> Document:
    return milliseconds([row["ttft_s"] for row in rows]).model_dump()
