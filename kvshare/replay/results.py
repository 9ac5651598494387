"""
The files that a replay writes, and the schema of `results.json`, which replay, report and terminal share.

    OUT/results.json       `Results`; equal for equal files, options and seed, except for "times"
    OUT/requests.parquet   one row per request and policy, see rows.py
    OUT/paper.json         only with --paper, see paper.py
    OUT/checkpoint/        while a run is not finished

They hold numbers and fixed words, and of the log only languages and file names: no prompt text, token ids,
user names or folders.

The fields of these classes are the keys of the document, in its order; policies are called "arms" there. A
missing key reads as empty and a number that is not finite as None, so that files of older versions stay
readable.
"""

import math
from typing import Annotated, Any, Final, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict

from kvshare.logs.unreadable import Unreadable

SCHEMA_VERSION: Final = 1
RESULTS_FILE: Final = "results.json"
REQUESTS_FILE: Final = "requests.parquet"

Document = dict[str, Any]
Row = dict[str, Any]

SHARES: Final = (50, 70, 90)  # percent of a request's tokens: the paper's readings


def finite(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


Number = Annotated[int | float | None, BeforeValidator(finite)]


class ResultsPart(BaseModel):
    model_config = ConfigDict(frozen=True)


class NetSaved(ResultsPart):
    """Seconds, after look-up, planning and the embeddings for the look-up, at the mean time of a text."""

    mean: Number = None
    total: Number = None


class Saved(NetSaved):
    """Seconds to the first token, without the time that the policy takes. `share`: of all prefill."""

    share: Number = None


class Figures(ResultsPart):
    """The figures of one policy over some requests. Rates are shares of 1."""

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
    ttft_saved_s: Saved = Saved()  # estimated from `prefill_tokens_per_s`

    @property
    def at_least(self) -> tuple[float | None, ...]:
        return self.request_hit_rate_50, self.request_hit_rate_70, self.request_hit_rate_90


class Histogram(ResultsPart):
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


class StorageFigures(ResultsPart):
    final_bytes: int | None = None
    peak_bytes: int | None = None
    bytes_per_request: Number = None


class Tree(ResultsPart):
    """The tree of prompts that build on earlier ones."""

    depth: Histogram = Histogram()
    children: Histogram = Histogram()
    num_nodes: int = 0
    num_roots: int = 0
    num_segments: int = 0
    num_prompt_tokens: int = 0
    num_stored_tokens: int = 0


class Store(ResultsPart):
    """A policy with a store; capacity None: infinite."""

    arm: str = "?"  # "kvshare:min_run=32"
    label: str = "?"  # the same, or with " @ 1,000,000 tokens"
    family: str = "?"
    capacity_tokens: int | None = None
    capacity_bytes: int | None = None
    options: Document = {}


class PolicyResults(Figures, Store):  # in this order the keys of a store come first
    """Everything of one policy with one store that does not depend on a clock."""

    coverage_histogram: tuple[int, ...] = ()  # 101: requests by percent of tokens not computed
    num_copies: Histogram = Histogram()
    num_donors: Histogram = Histogram()
    shift_tokens: Histogram = Histogram()
    reasons: dict[str, int] = {}  # why nothing or no more was shared -> requests
    storage: StorageFigures = StorageFigures()
    series: tuple[Stretch, ...] = ()  # 100 to 200
    # "language" | "length" | "turn" (first, later, unknown) | "origin" (same_user, cross_user, none, or
    # unknown: another conversation, users not named) -> key -> figures
    by: dict[str, dict[str, Figures]] = {}
    tree: Tree | None = None  # of kvshare policies


class Threshold(ResultsPart):
    """The share of requests with an earlier prompt within this distance."""

    distance: Number = None
    share: Number = None


class Similarity(ResultsPart):
    """Requests by distance to the nearest earlier prompt (rows) and share of equal tokens (columns)."""

    distance_edges: tuple[int | float, ...] = ()
    overlap_edges: tuple[int | float, ...] = ()
    counts: tuple[tuple[int, ...], ...] = ()
    overlap: str = ""  # the policy whose hits are the equal tokens
    thresholds: tuple[Threshold, ...] = ()


class Step(ResultsPart):
    name: str
    num_tokens: int  # a loss is negative


class Waterfall(ResultsPart):
    """
    The steps from the oracle's tokens down to the reused ones; their tokens add up.

    oracle, then losses: not_found; too_short (all that the oracle has of prompts that are not looked up);
    generation (rejected only for their generation); refused (by another threshold or the number of donors);
    repaired; then hit. An equal prefix of less than 16 tokens that is copied along with more can make
    not_found positive.
    """

    arm: str = "?"
    num_tokens: int = 0
    steps: tuple[Step, ...] = ()


class LogFile(ResultsPart):
    name: str = "?"  # without folders
    num_bytes: int = 0
    sha256: str = ""


class Data(ResultsPart):
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


class Milliseconds(ResultsPart):
    mean: Number = None
    p50: Number = None
    p90: Number = None
    p99: Number = None
    max: Number = None


class PolicyTimes(ResultsPart):
    lookup_ms: Milliseconds = Milliseconds()
    plan_ms: Milliseconds = Milliseconds()
    observe_ms: Milliseconds = Milliseconds()
    requests_per_s: Number = None  # with the time to find what thresholds cost
    ttft_saved_net_s: NetSaved = NetSaved()


class EmbeddingTimes(ResultsPart):
    num_texts: int = 0
    seconds: Number = None
    texts_per_s: Number = None


class RunTimes(ResultsPart):
    """Everything that depends on a clock."""

    started_at: str = ""
    wall_s: Number = None
    requests_per_s: Number = None
    resumed: int = 0  # times
    embedding: EmbeddingTimes | None = None
    arms: dict[str, PolicyTimes] = {}  # by label


class Results(ResultsPart):
    schema_version: int = SCHEMA_VERSION
    kind: str = "replay"
    complete: bool = True
    config: Document = {}  # see options.py
    data: Data = Data()
    versions: dict[str, str | None] = {}
    arms: tuple[PolicyResults, ...] = ()  # in the given order; of each policy the infinite store first
    similarity: Similarity | None = None  # None: no policy embeds
    waterfall: tuple[Waterfall, ...] = ()  # of each kvshare policy, if there is an oracle
    times: RunTimes = RunTimes()


def policy_label(policy: str, capacity_tokens: int | None) -> str:
    """Return the name of a policy with its store in results and reports."""
    return policy if capacity_tokens is None else f"{policy} @ {capacity_tokens:,} tokens"
