"""
What must be true before anything is shared, tried out on the running model before the first request.

    layout     what vLLM writes into a block is read back bit by bit
    partial    scattered runs give the KV that one pass gives
    listening  from queries and stored keys follow the attention weights that the kernel used
    movement   how rows get to other positions is found layer by layer; see `kvshare.kv.movement`

A layer without positions, a mask that is not causal, a kernel that reads its cache in another way: each fails
one of them, whatever the model is called.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from delta_tree import Span
from kvshare.kv.listening import attention
from kvshare.kv.movement import Observed, Proof, prove
from kvshare.kv.segment import SegmentKV
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import PartialForward, Run

_NUM_TOKENS = 48
_RUNS = (Span(0, 7), Span(7, 8), Span(8, 30), Span(30, 48))
_SHIFTS = (37, 133)
_FIRST_BLOCK = 1  # vLLM keeps block 0 for itself; the others are free until the first request
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


class SelfTest:
    """Tries one worker's parts. The blocks it writes hold nothing of value afterwards."""

    def __init__(self, cache: PagedCache, forward: PartialForward, *, vocab_size: int) -> None:
        self._cache = cache
        self._forward = forward
        num_blocks = -(-_NUM_TOKENS // cache.block_size)
        self._block_ids = tuple(range(_FIRST_BLOCK, _FIRST_BLOCK + num_blocks))
        generator = torch.Generator().manual_seed(7)
        self._tokens = tuple(torch.randint(0, vocab_size, (_NUM_TOKENS,), generator=generator).tolist())

    def check_layout(self) -> str | None:
        """Why blocks cannot be read, or None."""
        return self._cache.find_layout(_FIRST_BLOCK)

    def check_partial_attention(self) -> str | None:
        """Why partial attention is not exact here, or None."""
        whole = self._compute([Span(0, _NUM_TOKENS)])
        # Right to left first, so that a run finds rubbish where it must not look.
        self._cache.write(
            torch.full_like(whole.k, 3.0, device=self._cache.kv_layout.device),
            torch.full_like(whole.v, -3.0, device=self._cache.kv_layout.device),
            self._cache.slots(self._block_ids, Span(0, _NUM_TOKENS)),
        )
        parts = self._compute(_RUNS)
        if not (self._agree(whole.k, parts.k) and self._agree(whole.v, parts.v)):
            return "partial attention does not give what a whole prefill gives"
        return None

    def check_listening(self) -> str | None:
        """Why what tokens attend to cannot be followed, or None."""
        try:
            return self._check_listening()
        except Exception as exc:  # noqa: BLE001  sharing goes on without it
            return f"following attention raised an error: {type(exc).__name__}: {exc}"

    def _check_listening(self) -> str | None:
        whole = self._compute([Span(0, _NUM_TOKENS)])
        num_layers, errors = self._cache.kv_layout.num_layers, []

        table = self._cache.table(self._block_ids, _NUM_TOKENS)

        def watch(index: int, query: torch.Tensor, output: torch.Tensor) -> None:
            keys = self._cache.keys(index, table, _NUM_TOKENS)
            positions = torch.arange(_NUM_TOKENS, device=keys.device)
            scaling, form = self._forward.scaling(index), self._forward.form(index)
            values = whole.v[index].float().to(keys.device)  # (S, H, D)
            groups = query.transpose(0, 1).chunk(keys.shape[1])  # of the heads that share keys
            expected = torch.cat(
                [
                    attention(positions, group, keys[:, head], scaling=scaling, form=form, group=head)
                    @ values[:, head]
                    for head, group in enumerate(groups)
                ]
            ).transpose(0, 1)
            errors.append(self._agree(expected[None], output[None]))

        whole_prompt = Run(self._block_ids, Span(0, _NUM_TOKENS), self._tokens)
        self._forward.compute([whole_prompt], watching=lambda _: watch)
        if len(errors) != num_layers:
            return "the attention kernels cannot be watched"
        return None if all(errors) else "attention is not that of queries and stored keys"

    def movements(self, tables: Sequence[torch.Tensor]) -> list[tuple[Proof, Proof]]:
        """How each layer's K and V get to other positions, by these tables of frequencies or not at all."""
        whole = [Span(0, _NUM_TOKENS)]
        here = self._compute(whole)
        there = {shift: self._compute(whole, shift=shift) for shift in _SHIFTS}
        tolerance = _TOLERANCE.get(self._cache.kv_layout.dtype, 0.0)

        def proof(plane: int, layer: int) -> Proof:
            observed = [
                Observed(here.planes[plane][layer], far.planes[plane][layer], shift)
                for shift, far in there.items()
            ]
            return prove(tables, observed, tolerance=tolerance)

        return [(proof(0, layer), proof(1, layer)) for layer in range(self._cache.kv_layout.num_layers)]

    def _compute(self, spans: tuple[Span, ...] | list[Span], *, shift: int = 0) -> SegmentKV:
        self._forward.compute([Run(self._block_ids, span, self._tokens, shift) for span in spans])
        return self._cache.read(self._block_ids, Span(0, _NUM_TOKENS))

    def _agree(self, expected: torch.Tensor, got: torch.Tensor) -> bool:
        """Whether every layer's rows are as near as rounding allows, in units of its largest value."""
        difference = (expected.float() - got.float()).abs().flatten(1).amax(1)
        scale = expected.float().abs().flatten(1).amax(1).clamp(min=1e-6)
        return bool((difference <= _TOLERANCE.get(self._cache.kv_layout.dtype, 0.0) * scale).all())
