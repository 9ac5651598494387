"""
The stored prompts of a scenario: computed in full or shared, their KV, and the attention of their prefill.

A prompt becomes a node as in the server, and its KV is cut into the same segments.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

import delta_tree
from delta_tree import Composition, Copy, Node, NodeId, SegmentId, Span, TokenIds
from kvshare.kv.sequence import SegmentKV, SequenceKV
from kvshare.settings import Settings, SharingSettings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.node_draft import StoredSpan, computed_spans, draft_node
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import make_plan
from kvshare_lab.fidelity.layered import ForwardPass, LayeredModel
from kvshare_lab.fidelity.scenario import Prompt

_NAMESPACE = "lab"
_ANY_GENERATION = 2**30
_LAST_ROWS = 16  # of a prompt: those that an answer starts from

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Attention weights of a full prefill, summed up: means over heads. T tokens, P parts, L layers."""

    to_parts: Floats  # (T, P) from a token to each part, mean over layers
    to_itself: Floats  # (T,) mean over layers
    from_last: Floats  # (L, T) to each token from the prompt's last rows
    received: Floats  # (T,) by a token from its own part, mean over layers: as if parts were cached alone
    received_at: Floats  # (L, T) by a token from all rows


@dataclass(frozen=True, eq=False)  # no slots, for what is cached
class Prefill:
    """A prompt that was computed in full by a model."""

    model: LayeredModel
    prompt: Prompt
    kv: SequenceKV
    first: torch.Tensor  # (V,) log-probabilities of the answer's first token

    @cached_property
    def attention(self) -> Attention:
        """Computes the prompt again: few rules read it, and recording takes as long as computing."""
        return _recorded(self.model, self.prompt)


def prefill(model: LayeredModel, prompt: Prompt, *, room: int = 0) -> Prefill:
    """Compute a prompt in full; the KV gets `room` further slots."""
    num_tokens = len(prompt)
    kv = model.model.new_sequence(num_tokens + room)
    everything = ForwardPass(prompt.token_ids, np.arange(num_tokens))
    first = model.run(kv, everything, logits_of=np.array([num_tokens - 1]))[0]
    return Prefill(model, prompt, kv, first)


def _recorded(model: LayeredModel, prompt: Prompt) -> Attention:
    num_tokens, num_layers = len(prompt), model.num_layers
    is_in_part = torch.zeros(num_tokens, len(prompt.parts))
    for number, part in enumerate(prompt.parts):
        is_in_part[part.start : part.end, number] = 1.0
    to_parts = torch.zeros_like(is_in_part)
    to_itself, received = torch.zeros(num_tokens), torch.zeros(num_tokens)
    from_last, received_at = torch.zeros(num_layers, num_tokens), torch.zeros(num_layers, num_tokens)

    def record(layer: int, weights: torch.Tensor) -> None:
        mean = weights.mean(0).cpu()  # (T, T)
        to_parts.add_(mean @ is_in_part)
        to_itself.add_(mean.diagonal())
        received_at[layer] = mean.sum(0)
        from_last[layer] = mean[-_LAST_ROWS:].mean(0)
        for part in prompt.parts:
            inside = slice(part.start, part.end)
            received[inside] += mean[inside, inside].sum(0)

    everything = ForwardPass(prompt.token_ids, np.arange(num_tokens), weights=record)
    model.run(model.model.new_sequence(num_tokens), everything, logits_of=np.array([num_tokens - 1]))
    return Attention(
        to_parts=(to_parts / num_layers).numpy(),
        to_itself=(to_itself / num_layers).numpy(),
        received=(received / num_layers).numpy(),
        received_at=received_at.numpy(),
        from_last=from_last.numpy(),
    )


class StoredPrompts:
    """The stored prompts of a scenario, the KV of their segments, and the prefills of full ones."""

    def __init__(self, sharing: SharingSettings) -> None:
        self._sharing = sharing
        self._tree = delta_tree.DeltaTree.open(None, identity=None)
        self._node_ids: list[NodeId] = []  # oldest first
        self.kv: dict[SegmentId, SegmentKV] = {}
        self.prefills: dict[NodeId, Prefill] = {}

    @classmethod
    def computed(cls, model: LayeredModel, prompts: Iterable[Prompt], sharing: SharingSettings) -> Self:
        """These prompts, computed in full."""
        stored = cls(sharing)
        for prompt in prompts:
            stored.store_full(prefill(model, prompt))
        return stored

    @property
    def nodes(self) -> Sequence[Node]:
        """Newest first: the order in which a server nominates them."""
        return [self._tree.node(node_id) for node_id in reversed(self._node_ids)]

    @property
    def computed_nodes(self) -> list[tuple[Node, Prefill]]:
        """Those that were computed in full, newest first."""
        return [(node, self.prefills[node.node_id]) for node in self.nodes if node.node_id in self.prefills]

    def store(self, token_ids: TokenIds, kv: SequenceKV | None, plan: Plan | NoPlan) -> Node:
        """
        Store what was computed for a prompt; what its plan copied stays in its own segments.

        Without KV, later prompts can be planned with this one, but nothing can be copied.
        """
        stored = []
        for span in computed_spans(plan, len(token_ids), delta_tree.SEGMENT_TOKENS):
            segment_id = delta_tree.new_segment_id()
            if kv is not None:
                self.kv[segment_id] = kv.cut(span)
            stored.append(StoredSpan(segment_id, span, num_bytes=1))
        draft = draft_node(token_ids, plan, stored, namespace=_NAMESPACE, parent=None)
        node = self._tree.insert(draft).node
        self._node_ids.append(node.node_id)
        return node

    def store_full(self, done: Prefill) -> None:
        """Store a prompt that was computed in full, and keep its prefill."""
        node = self.store(done.prompt.token_ids, done.kv, NoPlan())
        self.prefills[node.node_id] = done

    def compose(self, token_ids: TokenIds) -> Composition:
        """All that a prompt could copy, whatever the admission checks would say."""
        return delta_tree.compose(
            token_ids,
            self.nodes,
            self._tree.segment,
            min_run=self._sharing.min_run,
            max_donors=self._sharing.max_donors,
            max_generation=_ANY_GENERATION,
            allow_approximate=True,
        )

    def plan(self, token_ids: TokenIds, settings: Settings, *, can_probe: bool = False) -> Plan | NoPlan:
        """The plan of a server with these settings, after its admission checks."""
        limits = PlannerLimits.from_settings(settings, can_probe=can_probe)
        rates = CostModel.from_settings(settings.cost, bytes_per_token=0).rates
        return make_plan(
            token_ids, self.nodes, self._tree.segment, approximate=True, limits=limits, rates=rates
        )


def copies_from(node: Node, source: Span, target: Span) -> list[Copy]:
    """Copies of a part of a stored prompt to a part of the new one, one for each piece of its KV."""
    found = []
    for start, segment_id, offset, length in node.pieces.rows():
        first = max(start, source.start)
        copied = min(start + length, source.end) - first
        if copied > 0:
            at = target.start + first - source.start
            found.append(Copy(node.node_id, segment_id, offset + first - start, copied, at, first, first))
    return found
