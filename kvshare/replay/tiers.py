"""
A log through memory above a disk: what is reused from where, and what is written, read and evicted, under
one policy of eviction or several. It never runs a server: nothing is written, and reads take no time.

    OUT/tiers.json    {"schema_version", "kind": "replay-tiers", "config", "data",
                       "unlimited": [{"arm", "num_bytes", ...}],     of each arm, with a store without limits
                       "stacks": [{"arm", "eviction", "host", "disk", "exact_share", ...}],
                       "versions", "times"}

A size is of bytes, or a share of what the first arm's store has at the end if it is unlimited; then the log
is read twice. Counts of tokens are of prompts: `exact` is an equal prefix, `approximate` all other hits.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from delta_tree import DEFAULT_EVICTION
from kvshare.errors import ConfigError
from kvshare.replay.options import ReplayOptions, Report, describe_log, describe_options, versions
from kvshare.replay.policies import PolicySpec, make_policy
from kvshare.replay.policies.base import BatchEmbeddings
from kvshare.replay.policies.sharing import SharingPolicy
from kvshare.replay.policies.weightless_stack import WeightlessStack
from kvshare.replay.requests import Outcome, TokenizedRequest, batches
from kvshare.replay.results import SCHEMA_VERSION, Document
from kvshare.replay.stream import RequestStream
from kvshare.replay.tokens import RequestTokenizer
from kvshare.replay.whole_files import write_document
from kvshare.telemetry import Component, EvictionCause, FallbackReason
from kvshare.tiers.near_memory import queue_of_segments
from vector_index import TextEmbedder

TIERS_FILE: Final = "tiers.json"
TIER_POLICIES: Final = "kvshare-fingerprints"
_BATCH: Final = 32
_NOT_STORED: Final = (FallbackReason.NO_ROOM, FallbackReason.TOO_LARGE)


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes, or a share of a store without limits. `text`: as it was given."""

    text: str
    num_bytes: int | None = None
    share: float = 0.0

    def of(self, unlimited_bytes: int) -> int:
        return int(self.share * unlimited_bytes) if self.num_bytes is None else self.num_bytes


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Memory, and a disk below it; None: there is none."""

    host: Size
    disk: Size | None = None

    def of(self, unlimited_bytes: int) -> tuple[int, int]:
        """
        Bytes of memory and disk, 0 for no disk.

        Raises:  ConfigError if the disk is smaller: what is in memory is there, too
        """
        host, disk = self.host.of(unlimited_bytes), 0 if self.disk is None else self.disk.of(unlimited_bytes)
        if self.disk is not None and disk < host:
            problem = f"disk:{self.disk.text} is less than host:{self.host.text}"
            raise ConfigError("--tier", f"{problem}: what is in memory is on disk, too")
        return host, disk


@dataclass(slots=True)
class _Counts:
    """Sums over the requests of one policy."""

    num_hit: int = 0
    num_exact: int = 0
    num_from_disk: int = 0
    num_exact_from_disk: int = 0

    def add(self, outcome: Outcome) -> None:
        self.num_hit += outcome.num_hit
        self.num_exact += min(outcome.num_exact, outcome.num_hit)
        self.num_from_disk += outcome.num_from_disk
        self.num_exact_from_disk += outcome.num_exact_from_disk

    def document(self) -> Document:
        return {
            "hit_tokens": self.num_hit,
            "exact_tokens": self.num_exact,
            "approximate_tokens": self.num_hit - self.num_exact,
        }


@dataclass(slots=True, eq=False)
class _Run:
    """One arm with one stack of tiers under one policy of eviction; without a stack: without limits."""

    policy: SharingPolicy
    counts: _Counts = field(default_factory=_Counts)

    def observe(self, request: TokenizedRequest) -> None:
        self.counts.add(self.policy.observe(request))

    def unlimited(self) -> Document:
        num_bytes = self.policy.keeper.tier.num_bytes
        return {"arm": self.policy.name, "num_bytes": num_bytes, **self.counts.document()}

    def stacked(self, sizes: TierSizes, unlimited: Document) -> Document:
        """Sum up reuse by tier. Shares are of what the same arm reuses with an infinite store."""
        stack, counts = self.policy.stack, self.counts
        assert stack is not None, "it has tiers"
        in_host = counts.num_exact - counts.num_exact_from_disk
        counted = self.policy.keeper.telemetry.counts()
        evicted, failed = counted.evictions, counted.fallbacks
        return {
            "arm": self.policy.name,
            "eviction": self.policy.eviction,
            "size": {"host": sizes.host.text, "disk": None if sizes.disk is None else sizes.disk.text},
            **counts.document(),
            "hit_share": counts.num_hit / max(1, unlimited["hit_tokens"]),
            "exact_share": counts.num_exact / max(1, unlimited["exact_tokens"]),
            "exact_share_of_host": in_host / max(1, unlimited["exact_tokens"]),
            "host": {
                "max_bytes": stack.max_bytes,
                "peak_bytes": stack.peak_bytes,
                "hit_tokens": counts.num_hit - counts.num_from_disk,
                "exact_tokens": in_host,
            },
            "disk": None if sizes.disk is None else _of_disk(stack, counts),
            "evictions": {"whole": evicted[EvictionCause.CAPACITY], "end": evicted[EvictionCause.END]},
            "num_not_stored": sum(failed[Component.STORE, reason] for reason in _NOT_STORED),
        }


def _of_disk(stack: WeightlessStack, counts: _Counts) -> Document:
    return {
        "max_bytes": stack.max_disk_bytes,
        "peak_bytes": stack.peak_disk_bytes,
        "hit_tokens": counts.num_from_disk,
        "exact_tokens": counts.num_exact_from_disk,
        "bytes_written": stack.num_written,
        "bytes_read": stack.num_read,
    }


def check_tier_arms(policies: Iterable[PolicySpec]) -> None:
    """Raises ConfigError for an arm that has no tiers."""
    for spec in policies:
        if not spec.is_kvshare:
            raise ConfigError("--arms", f"{spec.text} has no tiers; with --tier expected arms of kvshare")


def replay_tiers(
    options: ReplayOptions,
    stacks: Sequence[TierSizes],
    evictions: Sequence[str],
    *,
    embedder: TextEmbedder | None = None,
    report: Report = lambda done, total: None,
) -> Document:
    """
    Replay the log through each of the stacks under each policy, and write `tiers.json`; returns it.

    The log is read twice, and `report` counts the requests of both passes.

    Raises:  LogError, ModelError; ConfigError for sizes that do not fit each other, or arms without tiers
    """
    check_tier_arms(options.policies)
    began = time.perf_counter()
    with options.stream(report) as stream, ExitStack() as opened:
        tokenizer = RequestTokenizer.load(options.tokenizer)
        embeddings = options.embeddings(embedder) if options.embeds else None
        passes = _Passes(options, stream, tokenizer, embeddings, opened, report)
        free = [passes.run(spec) for spec in options.policies]
        num_tokens = passes.show(free)
        unlimited = {run.policy.name: run.unlimited() for run in free}
        footprint = unlimited[options.policies[0].text]["num_bytes"]
        limited = [
            (sizes, passes.run(spec, sizes.of(footprint), eviction))
            for sizes in stacks
            for spec in options.policies
            for eviction in evictions
        ]
        passes.show([run for _, run in limited], after=len(stream))
        data = {"num_requests": len(stream), "num_tokens": num_tokens}
        document: Document = {
            "schema_version": SCHEMA_VERSION,
            "kind": "replay-tiers",
            "config": describe_options(options, tokenizer, embeddings),
            "data": {**describe_log(options, stream), **data},
            "unlimited": list(unlimited.values()),
            "stacks": [run.stacked(sizes, unlimited[run.policy.name]) for sizes, run in limited],
            "versions": versions(),
            "times": {"wall_s": time.perf_counter() - began},
        }
    write_document(options.out / TIERS_FILE, document)
    return document


@dataclass(frozen=True, slots=True)
class _Passes:
    """Makes the policies of both passes, which are closed at the end, and shows them the log."""

    options: ReplayOptions
    stream: RequestStream
    tokenizer: RequestTokenizer
    embeddings: BatchEmbeddings | None
    opened: ExitStack
    report: Report

    def show(self, runs: Sequence[_Run], *, after: int = 0) -> int:
        """Returns how many tokens the prompts have. `after`: requests that were shown before."""
        num_tokens = 0
        for batch in batches(self.tokenizer.tokenize(self.stream), _BATCH):
            if self.embeddings is not None:
                self.embeddings.prepare(batch)
            for request in batch:
                num_tokens += request.num_tokens
                for run in runs:
                    run.observe(request)
            self.report(after + batch[-1].index + 1, 2 * len(self.stream))
        return num_tokens

    def run(
        self, spec: PolicySpec, sizes: tuple[int, int] | None = None, eviction: str | None = None
    ) -> _Run:
        stack = None
        if sizes is not None:
            host, disk = sizes
            # Without a disk, as with one that memory has room for: then nothing is read from it.
            stack = WeightlessStack(host, disk or host, queue_of_segments(eviction or DEFAULT_EVICTION))
        policy = make_policy(spec, self.options.context(self.embeddings), stack=stack, eviction=eviction)
        assert isinstance(policy, SharingPolicy), "checked"
        self.opened.callback(policy.close)
        return _Run(policy)
