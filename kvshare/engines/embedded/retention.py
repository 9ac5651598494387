"""What of one request is kept: its prompt as soon as that is computed, its answer when it has ended."""

from __future__ import annotations

import asyncio

from delta_tree import Node
from kvshare.engines.base import GenerationRequest
from kvshare.engines.embedded.server import EmbeddedServer
from kvshare.engines.embedded.task import Task
from kvshare.sharing.arrivals import Arrivals


class Retention:
    """
    From the plan of a request until nothing more of it will be stored. Runs on the event loop.

        planned      others like it wait                       `Arrivals`
        prefilled    the prompt is a node, they copy from it   `keep_prompt`
        ended        the node gets the answer                  `keep`
    """

    def __init__(self, server: EmbeddedServer, request: GenerationRequest, arrivals: Arrivals) -> None:
        self._server = server
        self._request = request
        self._arrivals = arrivals
        self._is_wanted = server.model.can_share and request.store
        self._arrival = (
            arrivals.begin(request.namespace.digest, request.prompt.token_ids) if self._is_wanted else None
        )
        self._prompt_kept = asyncio.Event()
        self._is_keeping_prompt = False
        self._node: Node | None = None

    def watch(self, task: Task) -> None:
        """Who waits looks at how far this task is."""
        if self._arrival is not None:
            self._arrival.remaining = lambda: task.num_remaining

    def give_up(self) -> None:
        """Nothing was computed, or nothing more will be stored: nobody need wait for it."""
        self._request.stored.is_settled = True
        if self._arrival is not None:
            self._arrivals.end(self._arrival)

    def keep_prompt(self, task: Task) -> None:
        """Its prefill is done."""
        if self._is_wanted and not self._is_keeping_prompt:
            self._is_keeping_prompt = True
            self._server.runtime.background.spawn(
                self._keep_prompt(task), namespace=self._request.namespace.digest
            )

    async def keep(self, task: Task) -> None:
        """After the scheduler let go of a task: store what it generated, index it, release its donors."""
        runtime = self._server.runtime
        await task.released.wait()
        try:
            if self._is_keeping_prompt:
                await self._prompt_kept.wait()
            if not self._is_wanted or task.error is not None or not task.prefilled:
                return
            node, found = await runtime.write(self._stored, task)
            self._request.stored.node = None if found is None else int(found.node_id)
            if node is None:  # it was known, or found no room: others may have left all the same
                await runtime.sharing.forget_evicted()
            else:
                whole = node.num_tokens >= self._request.prompt.num_tokens
                if whole:
                    await runtime.remember(node, self._request.prompt.text)
                else:  # its end has left: the meaning of the whole is not that of its beginning
                    await runtime.sharing.remember(node, None)
        finally:
            self.give_up()
            runtime.keeper.release(task.plan)

    async def _keep_prompt(self, task: Task) -> None:
        runtime = self._server.runtime
        try:
            self._node = await runtime.write(runtime.keeper.commit_prompt, task.computed_prompt)
            if self._node is None:
                await runtime.sharing.forget_evicted()
            else:  # by its meaning once it has its answer: that is expensive, and comes too late here
                await runtime.sharing.remember(self._node, None)
        finally:
            if self._arrival is not None:
                self._arrivals.end(self._arrival, stored=self._node is not None)
            self._prompt_kept.set()

    def _stored(self, task: Task) -> tuple[Node | None, Node | None]:
        """The node if it is new or longer, and where others find the prompt. In the writer's thread."""
        keeper, prompt = self._server.runtime.keeper, self._request.prompt
        node = keeper.complete(self._node, task.computed, num_prompt=prompt.num_tokens)
        return node, node or keeper.find_stored(task.computed.namespace, prompt.token_ids, task.plan)
