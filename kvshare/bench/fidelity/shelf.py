"""
What is stored of a scenario: prompts computed in full or shared, their KV, and what was seen while they were
computed. A prompt becomes a node as in the server; KV is cut into the same segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import (
    SEGMENT_TOKENS,
    Composition,
    Copy,
    DeltaTree,
    Node,
    NodeId,
    SegmentId,
    Span,
    TokenIds,
    common_prefix_length,
    compose,
    new_segment_id,
)
from kvshare.bench.fidelity.layered import LayeredModel, Pass
from kvshare.bench.fidelity.scenario import Prompt
from kvshare.kv.segment import SegmentKV
from kvshare.kv.sequence import SequenceKV
from kvshare.settings import Settings, SharingSettings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.node_draft import StoredSpan, computed_spans, draft_node
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import PlannerLimits, make_plan

_NAMESPACE = "lab"
_ANY_GENERATION = 2**30
_LAST_ROWS = 16  # of a prompt: those that an answer starts from


class Watched:
    """
    Attention of a prefill, summed up while it runs; means over heads.

    Shapes:  to_parts (T, P) from a token to each part, mean over layers; itself (T,) to itself
             from_last (L, T) to each token from the prompt's last rows
             received (T,) by a token from its own part, mean over layers: what caching a part by itself sees
             received_at (L, T) by a token from all rows
    """

    def __init__(self, prompt: Prompt, num_layers: int) -> None:
        num_tokens, self._parts = len(prompt), prompt.parts
        self._part_of = np.repeat(np.arange(len(prompt.parts)), [len(part) for part in prompt.parts])
        self._member = torch.zeros(num_tokens, len(prompt.parts))
        self._member[torch.arange(num_tokens), torch.from_numpy(self._part_of)] = 1.0
        self._num_layers = num_layers
        self._to_parts = torch.zeros(num_tokens, len(prompt.parts))
        self._received, self._itself = torch.zeros(num_tokens), torch.zeros(num_tokens)
        self._from_last = torch.zeros(num_layers, num_tokens)
        self._received_at = torch.zeros(num_layers, num_tokens)

    def see(self, layer: int, weights: torch.Tensor) -> None:
        """One layer's weights, (H_q, T, T)."""
        mean = weights.mean(0).cpu()
        self._to_parts += mean @ self._member
        self._itself += mean.diagonal()
        self._received_at[layer] = mean.sum(0)
        self._from_last[layer] = mean[-_LAST_ROWS:].mean(0)
        for part in self._parts:
            self._received[part.start : part.end] += mean[part.start : part.end, part.start : part.end].sum(0)

    @cached_property
    def to_parts(self) -> NDArray[np.float32]:
        return np.asarray(self._to_parts / self._num_layers)

    @cached_property
    def itself(self) -> NDArray[np.float32]:
        return np.asarray(self._itself / self._num_layers)

    @cached_property
    def received(self) -> NDArray[np.float32]:
        return np.asarray(self._received / self._num_layers)

    @cached_property
    def from_last(self) -> NDArray[np.float32]:
        return np.asarray(self._from_last)

    @cached_property
    def received_at(self) -> NDArray[np.float32]:
        return np.asarray(self._received_at)

    @property
    def part_of(self) -> NDArray[np.int64]:
        """(T,) the part of each token."""
        return self._part_of


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """A prompt computed in full."""

    prompt: Prompt
    kv: SequenceKV
    watched: Watched
    last: torch.Tensor  # (V,) log-probabilities of the first token of the answer


def prefill(model: LayeredModel, prompt: Prompt, *, room: int = 0) -> Prefill:
    """Compute a prompt in full, with what attention did. `room`: further slots."""
    num_tokens = len(prompt)
    kv = model.model.new_sequence(num_tokens + room)
    watched = Watched(prompt, model.num_layers)
    everything = Pass(prompt.token_ids, np.arange(num_tokens), weights=watched.see)
    last = model.run(kv, everything, logits_of=np.array([num_tokens - 1]))[0]
    return Prefill(prompt, kv, watched, last)


class Shelf:
    """The stored prompts of one scenario."""

    def __init__(self, sharing: SharingSettings) -> None:
        self._sharing = sharing
        self._tree = DeltaTree.open(None, identity=None)
        self._kv: dict[SegmentId, SegmentKV] = {}
        self._order: list[NodeId] = []
        self.prefills: dict[NodeId, Prefill] = {}

    @property
    def nodes(self) -> Sequence[Node]:
        """Newest first, as a server nominates them."""
        return [node for node_id in reversed(self._order) if (node := self._tree.get(node_id)) is not None]

    @property
    def kv(self) -> dict[SegmentId, SegmentKV]:
        """Of every segment."""
        return self._kv

    def store(self, token_ids: TokenIds, kv: SequenceKV | None, plan: Plan | NoPlan) -> Node:
        """
        Keep what was computed for a prompt; what its plan copied stays where it is.

        Without KV the prompt can be composed from, and nothing can be laid.
        """
        stored = []
        for span in computed_spans(plan, len(token_ids), SEGMENT_TOKENS):
            segment_id = new_segment_id()
            if kv is not None:
                self._kv[segment_id] = kv.cut(span)
            stored.append(StoredSpan(segment_id, span, num_bytes=1))
        draft = draft_node(token_ids, plan, stored, namespace=_NAMESPACE, parent=None)
        node = self._tree.insert(draft).node
        self._order.append(node.node_id)
        return node

    def store_full(self, done: Prefill) -> Node:
        """Keep a prompt that was computed in full, and what was seen."""
        node = self.store(done.prompt.token_ids, done.kv, NoPlan())
        self.prefills[node.node_id] = done
        return node

    def compose(self, token_ids: TokenIds, *, candidates: Sequence[Node] | None = None) -> Composition:
        """What a prompt could copy, whatever gates would say."""
        return compose(
            token_ids,
            self.nodes if candidates is None else candidates,
            self._tree.segment,
            min_run=self._sharing.min_run,
            max_donors=self._sharing.max_donors,
            max_generation=_ANY_GENERATION,
            allow_approximate=True,
        )

    def common_prefixes(self, token_ids: TokenIds) -> dict[NodeId, int]:
        """How much of a prompt each stored one begins with."""
        return {node.node_id: common_prefix_length(node.token_ids, token_ids) for node in self.nodes}

    def plan(self, token_ids: TokenIds, settings: Settings, *, can_probe: bool = False) -> Plan | NoPlan:
        """What a server with these settings would do, its refusals included."""
        return make_plan(
            token_ids,
            self.nodes,
            self._tree.segment,
            approximate=True,
            limits=PlannerLimits.from_settings(settings, can_probe=can_probe),
            rates=CostModel.from_settings(settings.cost, bytes_per_token=0).rates,
        )


def covered(spans: Sequence[Span], num_tokens: int) -> NDArray[np.bool_]:
    """(T,) which positions the spans cover."""
    mask = np.zeros(num_tokens, np.bool_)
    for span in spans:
        mask[span.start : span.end] = True
    return mask


def copies_from(node: Node, source: Span, target: Span) -> list[Copy]:
    """A part of a stored prompt, laid at a part of the new one."""
    found = []
    for start, segment_id, offset, length in node.pieces.rows():
        first, end = max(start, source.start), min(start + length, source.end)
        if first < end:
            target_start = target.start + first - source.start
            found.append(
                Copy(
                    donor=node.node_id,
                    segment_id=segment_id,
                    offset=offset + first - start,
                    length=end - first,
                    target_start=target_start,
                    source_position=first,
                    donor_start=first,
                )
            )
    return found
