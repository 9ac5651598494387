"""text_completion, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvshare.engines.base import GenerationRequest, TokenLogprob
from proxy.generate.chat.answers import OpenAIAnswer, finite
from proxy.generate.chat.bodies import CompletionBody


class CompletionAnswer(OpenAIAnswer):
    """The answer of POST /v1/completions."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        body: CompletionBody,
        *,
        model: str,
        echoed: Sequence[str] = (),
    ) -> None:
        """`echoed`: the text of each prompt, if choices begin with it."""
        super().__init__(requests, body, model=model)
        self._echoed = [text for text in echoed for _ in range(body.num_choices)]

    def _opening(self) -> list[tuple[int, dict[str, Any]]]:
        return [(index, self._part(text)) for index, text in enumerate(self._echoed)]

    def _whole(self, index: int) -> dict[str, Any]:
        echoed = self._echoed[index] if self._echoed else ""
        return {"text": echoed + self.choices[index].text}

    def _part(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        choice = self.choices[index]
        for token in tokens:
            offsets.append(choice.num_characters)
            choice.num_characters += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {entry.text: finite(entry.logprob) for entry in (*token.top, token)} for token in tokens
            ],
            "text_offset": offsets,
        }
