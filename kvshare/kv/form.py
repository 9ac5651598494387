"""How a layer attends: what it asks for beside softmax over all earlier slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvshare.kv.layout import ALL_EARLIER, Reach


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """
    What a layer asks of its attention beside softmax over all earlier slots.

    `softcap`: scores are capped at it by tanh (Gemma 2). `sinks`: (H_q,) a score for each head that takes its
    share of the weights and gives nothing (gpt-oss).
    """

    reach: Reach = ALL_EARLIER
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def weights(self, scores: torch.Tensor, hidden: torch.Tensor | None, *, heads: slice) -> torch.Tensor:
        """
        Attention weights of some query heads. Scores of what is hidden may be anything, even no number.

        Shapes:  scores (G, N, S) in float32, scaled; hidden (N, S) bool
                 -> (G, N, S), rows sum to 1, with sinks to less
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
