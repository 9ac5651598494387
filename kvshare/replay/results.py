"""
The files a replay writes: their names, their schema, their version. report/ draws only what stands here.

    OUT/results.json       `Results`; equal for equal input, config and seed, but for "times"
    OUT/requests.parquet   one row a request and arm, see rows.py
    OUT/paper.json         only with --paper; see paper.py
    OUT/checkpoint/        while a run is not finished

No prompt text, no token ids, no user names, no folders: numbers, and labels of ours. Languages and file names
are the only words that come from the log.

The fields of these classes are the keys of the document, in its order. What is missing in a document is
empty, and a number that is not finite is None: whoever reads draws what there is.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict

SCHEMA_VERSION: Final = 1
RESULTS_FILE: Final = "results.json"
REQUESTS_FILE: Final = "requests.parquet"

Document = dict[str, Any]
Row = dict[str, Any]

SHARES: Final = (50, 70, 90)  # percent of a request's tokens: the paper's readings


def finite(value: Any) -> Any:
    """The number, or None if it is none or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


Number = Annotated[int | float | None, BeforeValidator(finite)]


class Part(BaseModel):
    """A part of a document."""

    model_config = ConfigDict(frozen=True)


class NetSaved(Part):
    """Seconds; less look-up, plan and, for each text embedded for the look-up, the mean time of a text."""

    mean: Number = None
    total: Number = None


class Saved(NetSaved):
    """Seconds to the first token, nothing taken off. `share` is of all prefill."""

    share: Number = None


class Figures(Part):
    """Of one arm over some requests. Rates are shares of 1."""

    num_requests: int = 0
    num_tokens: int = 0
    num_hit_tokens: int = 0
    num_exact_tokens: int = 0
    num_repaired_tokens: int = 0
    token_hit_rate: Number = None  # hit tokens / tokens
    request_hit_rate: Number = None  # requests with any hit
    request_hit_rate_50: Number = None  # requests with at least that share of their tokens not computed
    request_hit_rate_70: Number = None
    request_hit_rate_90: Number = None
    recomputed_fraction: Number = None  # 1 - token_hit_rate
    num_answered: int = 0  # these three: response caches
    num_false_hits: int = 0
    false_hit_share: Number = None  # of those answered
    ttft_saved_s: Saved = Saved()  # estimated: at the given prefill speed, the look-up not taken off

    @property
    def at_least(self) -> tuple[float | None, ...]:
        """The request hit rates of `SHARES`."""
        return self.request_hit_rate_50, self.request_hit_rate_70, self.request_hit_rate_90


class Histogram(Part):
    """Bucket i holds [edges[i], edges[i + 1]); the last one is open."""

    edges: tuple[int | float, ...] = ()
    counts: tuple[int, ...] = ()
    mean: Number = None
    max: Number = None
    count: int = 0


class Stretch(NamedTuple):
    """A part of the stream, from request `first` on."""

    first: int
    num_requests: int
    num_tokens: int
    num_hit: int
    num_bytes: int  # stored at its end


class Storage(Part):
    """What the arm's store holds."""

    final_bytes: int | None = None
    peak_bytes: int | None = None
    bytes_per_request: Number = None


class Tree(Part):
    """How prompts are made of earlier ones."""

    depth: Histogram = Histogram()
    children: Histogram = Histogram()
    num_nodes: int = 0
    num_roots: int = 0
    num_segments: int = 0
    num_prompt_tokens: int = 0
    num_stored_tokens: int = 0


class Store(Part):
    """Which way of caching, with which store; no capacity: infinite."""

    arm: str = "?"  # "kvshare:min_run=32"
    label: str = "?"  # arm, or "arm @ 1,000,000 tokens"
    family: str = "?"
    capacity_tokens: int | None = None
    capacity_bytes: int | None = None
    options: Document = {}


class ArmResults(Figures, Store):  # in this order the keys of a store come first
    """Everything of one arm with one store that no clock had a part in."""

    coverage_histogram: tuple[int, ...] = ()  # 101: requests by percent of tokens not computed
    num_copies: Histogram = Histogram()
    num_donors: Histogram = Histogram()
    shift_tokens: Histogram = Histogram()
    reasons: dict[str, int] = {}  # why nothing or no more was shared -> requests
    storage: Storage = Storage()
    series: tuple[Stretch, ...] = ()  # 100 to 200
    # "language" | "length" | "turn" (first, later, unknown) | "origin" (same_user, cross_user, none, or
    # unknown: from another conversation where the log names no users) -> key -> figures
    by: dict[str, dict[str, Figures]] = {}
    tree: Tree | None = None  # KVShare's arms only


class Threshold(Part):
    """The share of requests with an earlier prompt so near."""

    distance: Number = None
    share: Number = None


class Similarity(Part):
    """Requests by distance to the nearest earlier prompt (rows) and share of tokens in common (columns)."""

    distance_edges: tuple[int | float, ...] = ()
    overlap_edges: tuple[int | float, ...] = ()
    counts: tuple[tuple[int, ...], ...] = ()
    overlap: str = ""  # "oracle", or the arm whose hits are meant
    thresholds: tuple[Threshold, ...] = ()


class Step(Part):
    """A loss is negative."""

    name: str
    num_tokens: int


class Waterfall(Part):
    """
    From what the oracle covers down to what was not computed, the steps' tokens adding up.

    oracle, then losses: not_found; too_short, all that the oracle has of prompts that are not looked up;
    generation, refused if only the generation did not matter; refused, by the other gates and the number of
    donors; repaired; then hit. An equal prefix of less than 16 tokens, copied along with more, can make
    not_found positive.
    """

    arm: str = "?"
    num_tokens: int = 0
    steps: tuple[Step, ...] = ()


class LogFile(Part):
    """Its name without folders."""

    name: str = "?"
    num_bytes: int = 0
    sha256: str = ""


class UnreadableLine(Part):
    """Where a row stands that could not be read."""

    source: str
    line: int
    reason: str


class Unreadable(Part):
    """Rows that could not be read, by reason, and the first of them."""

    num_rows: int = 0
    reasons: dict[str, int] = {}
    lines: tuple[UnreadableLine, ...] = ()


class Data(Part):
    """What of the log was replayed."""

    files: tuple[LogFile, ...] = ()
    sha256: str = "–"  # of the tokens in order
    num_requests: int = 0
    num_tokens: int = 0
    num_answer_tokens: int = 0
    num_conversations: int = 0
    num_users: int = 0
    num_namespaces: int = 0
    languages: dict[str, int] = {}  # -> requests
    length_histogram: Histogram = Histogram()  # of prompts, in tokens
    unreadable: Unreadable = Unreadable()


class Milliseconds(Part):
    """How long something took."""

    mean: Number = None
    p50: Number = None
    p90: Number = None
    p99: Number = None
    max: Number = None


class ArmTimes(Part):
    """Of one arm with one store."""

    lookup_ms: Milliseconds = Milliseconds()
    plan_ms: Milliseconds = Milliseconds()
    observe_ms: Milliseconds = Milliseconds()
    requests_per_s: Number = None  # its second look at what the gates cost included
    ttft_saved_net_s: NetSaved = NetSaved()


class EmbeddingTimes(Part):
    """What the embedder had to do."""

    num_texts: int = 0
    seconds: Number = None
    texts_per_s: Number = None


class RunTimes(Part):
    """Everything that a clock had a part in."""

    started_at: str = ""
    wall_s: Number = None
    requests_per_s: Number = None
    resumed: int = 0  # times
    embedding: EmbeddingTimes | None = None
    arms: dict[str, ArmTimes] = {}  # by label


class Results(Part):
    """`results.json`."""

    schema_version: int = SCHEMA_VERSION
    kind: str = "replay"
    complete: bool = True
    config: Document = {}  # see options.py
    data: Data = Data()
    versions: dict[str, str | None] = {}
    arms: tuple[ArmResults, ...] = ()  # in the order asked for; per arm the infinite store first
    similarity: Similarity | None = None  # None: no arm looked at meaning
    waterfall: tuple[Waterfall, ...] = ()  # one per KVShare arm with an infinite store, with an oracle
    times: RunTimes = RunTimes()


def arm_label(arm: str, capacity_tokens: int | None) -> str:
    """How results and reports call an arm with its store."""
    return arm if capacity_tokens is None else f"{arm} @ {capacity_tokens:,} tokens"
