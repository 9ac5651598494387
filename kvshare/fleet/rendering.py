"""Has vLLM itself turn bodies into the tokens that it would compute."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvshare.errors import UpstreamError
from kvshare.fleet.client import NO_ROUTE, RenderedPrompt
from kvshare.fleet.replica import Fleet
from kvshare.fleet.token_lists import TokenList

log = logging.getLogger(__name__)


class Renderer:
    """Asks the idlest replica that can: all of them serve one model."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def render(self, path: str, body: bytes) -> list[RenderedPrompt] | None:
        """
        Return the prompts that vLLM would compute for a body sent to `path`; None if no replica has
        `/render`.

        Raises:  NoReplicaError, UpstreamError
        """
        self._fleet.idlest()
        while replica := next((entry for entry in self._fleet.serving() if entry.renders), None):
            try:
                return await replica.vllm.render(path, body)
            except UpstreamError as exc:
                if exc.status not in NO_ROUTE:
                    raise
                if replica.renders:  # another request may have noticed meanwhile
                    log.warning(
                        "replica %s has no /render routes: /v1/responses and /v1/messages are not shared, "
                        "and chats are tokenized by /tokenize. To share them, start vLLM with "
                        "--enable-scale-out",
                        replica.name,
                    )
                replica.renders = False
        return None

    async def tokenize(self, body: Mapping[str, Any]) -> TokenList:
        """Tokenize with vLLM's template and tokenizer. Raises NoReplicaError, UpstreamError."""
        return await self._fleet.idlest().vllm.tokenize(body)
