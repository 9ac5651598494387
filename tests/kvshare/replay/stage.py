"""What a server and a replay of the same stream have in common: settings, a decision a request, what left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from delta_tree import DeltaTree
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.fleet.engine import VllmEngine
from kvshare.requests import SharingReport
from kvshare.settings import Settings, load_settings
from kvshare.sharing.calibration import FOLDER
from kvshare_lab.bench.random_models import write_model
from vector_index import TextEmbedder

PREFILL_TOKENS_PER_S = 1000.0
BYTES_PER_TOKEN = 4096  # of the small model in float32
MAX_MODEL_LEN = 2048
MAX_TOKENS = 3  # of an answer


@dataclass(frozen=True, slots=True)
class Decision:
    """What one request came to, and which earlier ones left the store for it."""

    decision: str
    exact: int
    copied: int
    repaired: int
    computed: int  # the repaired ones among them
    evicted: frozenset[tuple[int, int]]  # with how many of its tokens stay


@dataclass(slots=True)
class Served:
    """A stream as one server served it. `answers`: the generated tokens whose KV was computed."""

    decisions: list[Decision] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stage:
    """
    What all of them run on: one model, one capacity. `embedder` None: no search by embedding.

    The capacity is a multiple of 7 tokens, so that vLLM's, with its headroom, is whole.
    """

    folder: Path
    capacity_tokens: int
    embedder: TextEmbedder | None = None
    repair_rule: str = "windows"
    max_risk: float = 0.02

    @property
    def model(self) -> Path:
        folder = self.folder / "model"
        if not folder.exists():
            write_model("small", folder, dtype="float32", max_model_len=MAX_MODEL_LEN)
        return folder

    @property
    def capacity_bytes(self) -> int:
        return self.capacity_tokens * BYTES_PER_TOKEN

    def settings(self, name: str, **more: object) -> Settings:
        return load_settings(
            overrides={
                "store.path": str(self.folder / name),
                "store.kv_bytes": self.capacity_bytes,
                "store.disk_bytes": 0,  # a replay has memory only
                "model.path": str(self.model),
                "model.dtype": "float32",
                "cost.prior_prefill_tokens_per_s": PREFILL_TOKENS_PER_S,
                "cost.learn": False,
                "control.unshared_share": 0.0,  # a replay has no controller
                "repair.rule": self.repair_rule,
                "sharing.max_risk": self.max_risk,
                "sharing.calibration": str(FOLDER / "smollm2-135m-instruct.json"),  # a replay has no model
                "index.dense": self.embedder is not None,
                "index.dense_min_tokens": 64,  # also where tokens found something
                "index.dense_max_share": None,
                "index.dense_min_uncovered": 0.1,
                "index.search_timeout_s": 60.0,
                "index.embed_timeout_s": 60.0,
                **more,
            }
        )

    @contextmanager
    def embedding(self) -> Iterator[None]:
        """Servers that start meanwhile embed with this stage's embedder."""
        with patch("kvshare.served_index._load_embedder", lambda settings: (self.embedder, None)):
            yield


class Departures:
    """What has left a tree since the last look, whole prompts and ends, by request: node ids differ."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[int, int]] = {}  # node id: request, tokens

    def look(self, index: int, tree: DeltaTree) -> frozenset[tuple[int, int]]:
        """Requests and how many of their tokens stay. The node that is new belongs to request `index`."""
        lengths = {int(node.node_id): node.num_tokens for node in tree.nodes()}
        left = set()
        for node_id, (owner, num_tokens) in list(self._alive.items()):
            num_kept = lengths.get(node_id, 0)
            if num_kept < num_tokens:
                left.add((owner, num_kept))
        known = {node_id: owner for node_id, (owner, _) in self._alive.items()}
        self._alive = {i: (known.get(i, index), num_tokens) for i, num_tokens in lengths.items()}
        return frozenset(left)


def check_whole(engine: EmbeddedEngine | VllmEngine) -> None:
    """Nothing was given up, such as a search that took too long on a busy machine."""
    counts = engine.status().counts
    assert not counts.fallbacks
    assert not counts.replica_failures


def decision_of(report: SharingReport, num_computed: int, evicted: frozenset[tuple[int, int]]) -> Decision:
    return Decision(
        report.decision, report.num_exact, report.num_copied, report.num_repaired, num_computed, evicted
    )
