"""How a layer attends, where that is more than softmax over all earlier slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvshare.kv.layout import ALL_EARLIER, Reach


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """
    What a layer needs of its attention beside softmax over all earlier slots.

    `softcap`: tanh caps the scores at this value (Gemma 2). `sinks`: (H_q,) one more score for each head,
    which takes part in the softmax and has no value (gpt-oss).
    """

    reach: Reach = ALL_EARLIER
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def weights(self, scores: torch.Tensor, hidden: torch.Tensor | None, *, heads: slice) -> torch.Tensor:
        """
        Attention weights of some query heads. Scores of hidden slots may be anything, also NaN.

        Shapes:  scores (G, N, S) in float32, scaled; hidden (N, S) bool
                 -> (G, N, S); rows sum to 1, and to less with sinks
        """
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is None:
            return scores.softmax(dim=-1)
        sink = self.sinks[heads].float()[:, None, None].expand(-1, scores.shape[1], 1)
        return torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]


PLAIN = Form()
