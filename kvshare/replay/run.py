"""
Runs a replay: every request of the stream is shown to all policies; rows, figures and files come out.

No figure depends on a clock, or on chance other than the seed: two runs give the same `results.json` except
for its "times", and so does a run that was interrupted and resumed.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import numpy as np

from kvshare.errors import LogError
from kvshare.replay import results as schema
from kvshare.replay.measures import describe_data, policy_results, policy_times, similarity, waterfalls
from kvshare.replay.options import ReplayOptions, Report, describe_files, describe_options, versions
from kvshare.replay.policies import open_policies
from kvshare.replay.policies.base import BatchEmbeddings, CachePolicy
from kvshare.replay.requests import TokenizedRequest, batches
from kvshare.replay.results import REQUESTS_FILE, RESULTS_FILE, Document, Row
from kvshare.replay.rows import Checkpoint, Progress, RowMaker, make_row, read_policy
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

    `embedder` is used only if a policy embeds; None: the one of config.yaml.
    Raises:  LogError, ModelError
    """
    with options.stream(report) as stream:
        tokenizer = RequestTokenizer.load(options.tokenizer)
        embeddings = options.embeddings(embedder) if options.embeds else None
        answers = any(spec.name == "response" for spec in options.policies)
        punctuation_ids = tokenizer.punctuation_ids() if answers else frozenset()
        context = replace(options.context(embeddings), punctuation_ids=punctuation_ids, explain_losses=True)
        with open_policies(options.policies, context, (None, *options.capacities_tokens)) as policies:
            run = _Run(options, stream, tokenizer, embeddings, policies)
            return run.complete(resume=resume, report=report)


@dataclass(eq=False)
class _Run:
    """One replay from its start, or its checkpoint, to its files."""

    options: ReplayOptions
    stream: RequestStream
    tokenizer: RequestTokenizer
    embeddings: BatchEmbeddings | None
    policies: Sequence[CachePolicy]

    def __post_init__(self) -> None:
        self._files = describe_files(self.options.paths)
        self._config = describe_options(self.options, self.tokenizer, self.embeddings)
        self._checkpoint = Checkpoint(self.options.out)
        self._pending: list[Row] = []
        self._hash = hashlib.sha256()  # of the data so far
        self._started_at = datetime.now(UTC)
        self._began = time.perf_counter()

    def complete(self, *, resume: bool, report: Report) -> Document:
        """Show all requests to the policies, then write the files."""
        files = [file.model_dump() for file in self._files]
        run = {"config": self._config, "files": files, "versions": versions()}
        identity = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()
        progress = self._observe_all(self._checkpoint.begin(identity, resume=resume), report)
        self._checkpoint.join(self.options.out / REQUESTS_FILE)
        document = self._results(progress).model_dump(mode="json")
        write_document(self.options.out / RESULTS_FILE, document)
        self._checkpoint.clear()
        return document

    def _observe_all(self, progress: Progress, report: Report) -> Progress:
        maker = RowMaker()
        for batch in batches(self.tokenizer.tokenize(self.stream), _BATCH):
            if self.embeddings is not None:
                self.embeddings.prepare(batch)
            for request in batch:
                rows, num_observed = self._observe(request, maker), request.index + 1
                if num_observed > progress.num_requests:
                    self._pending += rows
                elif num_observed == progress.num_requests and self._hash.hexdigest() != progress.digest:
                    raise LogError("the log differs from the interrupted run's; start again without --resume")
                report(num_observed, len(self.stream))
            if len(self._pending) >= self.options.checkpoint_every * len(self.policies):
                progress = self._save(progress)
        return self._save(progress)

    def _observe(self, request: TokenizedRequest, maker: RowMaker) -> list[Row]:
        common = maker.common(request)
        rows = []
        for policy in self.policies:
            began = time.perf_counter()
            outcome = policy.observe(request)
            rows.append(make_row(common, policy, outcome, observe_s=time.perf_counter() - began))
        self._hash.update(_content(request, common))
        return rows

    def _save(self, progress: Progress) -> Progress:
        now = time.perf_counter()
        saved = replace(
            progress,
            num_requests=progress.num_requests + len(self._pending) // len(self.policies),
            digest=self._hash.hexdigest(),
            wall_s=progress.wall_s + now - self._began,
        )
        if self._pending:
            self._checkpoint.save(saved, self._pending)
        self._began, self._pending = now, []
        return saved

    def _results(self, progress: Progress) -> schema.Results:
        """Compute results from the rows, with those of one policy in memory at a time."""
        rows_of = partial(read_policy, self.options.out / REQUESTS_FILE)
        prefill, embeddings = self.options.prefill_tokens_per_s, self.embeddings
        embedding_s = embeddings.seconds / max(1, embeddings.num_texts) if embeddings else 0.0
        policies, clocks = [], {}
        for policy in self.policies:
            rows, store = rows_of(policy.name, policy.capacity_tokens), policy.store
            policies.append(policy_results(rows, store, policy.describe_tree(), prefill_tokens_per_s=prefill))
            clocks[store.label] = policy_times(rows, prefill_tokens_per_s=prefill, embedding_s=embedding_s)
        families = {each.name: each.family for each in self.policies if each.capacity_tokens is None}
        return schema.Results(
            config=self._config,
            data=describe_data(
                rows_of(self.policies[0].name),
                sha256=self._hash.hexdigest(),
                files=self._files,
                unreadable=self.stream.report.unreadable(),
            ),
            versions=versions(),
            arms=tuple(policies),
            similarity=similarity(families, rows_of),
            waterfall=waterfalls(families, rows_of),
            times=schema.RunTimes(
                started_at=self._started_at.isoformat(timespec="seconds"),
                wall_s=progress.wall_s,
                requests_per_s=progress.num_requests / progress.wall_s if progress.wall_s else 0.0,
                resumed=progress.num_resumed,
                embedding=embeddings.times if embeddings else None,
                arms=clocks,
            ),
        )


def _content(request: TokenizedRequest, common: Row) -> bytes:
    """Everything that a policy's figures depend on, except for texts; `common`: see rows.py."""
    user = 0 if common["user"] is None else common["user"] + 1
    names = (common["namespace"], user, common["conversation"])
    frame = np.array([*names, request.num_tokens, len(request.answer_ids)], "<i8")
    tokens = (ids.astype("<i4", copy=False) for ids in (request.token_ids, request.answer_ids))
    return b"".join(part.tobytes() for part in (frame, *tokens))
