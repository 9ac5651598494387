"""Stores the KV of one request: the prompt once it is computed, the answer once the request has ended."""

from __future__ import annotations

import asyncio

from delta_tree import Node
from kvshare.embedded.server import EmbeddedServer
from kvshare.embedded.task import Task
from kvshare.engine import GenerationRequest
from kvshare.namespace import Owner
from kvshare.requests import StoredPrompt
from kvshare.sharing.arrivals import Arrivals
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.plan import Plan

# Of the event loop, in which an answer that has ended is written: storing would keep the interpreter from it.
_TURNS_OF_ANSWER = 2


class Retention:
    """
    Lives from the plan of a request until nothing more of it will be stored. Runs on the event loop.

        planned      similar requests wait for it               `Arrivals`
        prefilled    its prompt becomes a node to copy from     `store_prompt`, if the answer goes on
        ended        the answer is added to the node            `store`
    """

    def __init__(self, server: EmbeddedServer, request: GenerationRequest, arrivals: Arrivals) -> None:
        self._server = server
        self._request = request
        self._arrivals = arrivals
        self.stored = StoredPrompt()
        self._is_wanted = server.model.can_share and request.store
        self._arrival = (
            arrivals.begin(request.namespace.digest, request.prompt.token_ids) if self._is_wanted else None
        )
        self._unused: Lookup | None = None  # one that has taught something, and has no donors
        self._prompt_stored = asyncio.Event()
        self._is_storing_prompt = False
        self._node: Node | None = None

    def note_use(self, lookup: Lookup) -> None:
        """
        Mark the donors as used, and remove what cannot be. If the lookup only teaches, learn from it when the
        answer has ended.
        """
        if isinstance(lookup.plan, Plan) or lookup.unreadable or lookup.unknown:
            self._server.runtime.sharing.note_use(lookup)
        else:
            self._unused = lookup

    def watch(self, task: Task) -> None:
        """Let requests that wait for this one see how much of its prompt remains."""
        if self._arrival is not None:
            self._arrival.remaining = lambda: task.num_remaining

    def give_up(self) -> None:
        """Let no request wait for this one any more, because nothing more of it will be stored."""
        self.stored.is_settled = True
        if self._arrival is not None:
            self._arrivals.end(self._arrival)

    def store_prompt(self, task: Task) -> None:
        """Store the prompt in the background, once it is prefilled."""
        if self._is_wanted and not self._is_storing_prompt:
            self._is_storing_prompt = True
            self._server.runtime.background.spawn(
                self._store_prompt(task), namespace=self._request.namespace.digest
            )

    async def store(self, task: Task) -> None:
        """Wait until a task is released; then store the answer, index it, and release the donors."""
        runtime = self._server.runtime
        await task.released.wait()
        for _ in range(_TURNS_OF_ANSWER):
            await asyncio.sleep(0)
        if self._unused is not None:
            runtime.sharing.note_use(self._unused)
        try:
            if self._is_storing_prompt:
                await self._prompt_stored.wait()
            if not self._is_wanted or task.error is not None or not task.prefilled:
                if task.teaches:
                    await runtime.write(task.learn)
                return
            self._note_owner()
            node, stored = await runtime.write(self._complete, task)
            if self._arrival is not None:
                self._arrivals.end(self._arrival, stored=stored is not None)
            self.stored.node = None if stored is None else int(stored.node_id)
            if stored is not None and self._server.shared_prompts is not None:
                self._server.shared_prompts.note(stored)
            if node is None:
                # It was stored already, or did not fit; other prompts may have been evicted anyway.
                await runtime.sharing.indexing.forget_evicted()
            elif node.num_tokens >= self._request.prompt.num_tokens:
                await runtime.remember(node, self._request.prompt.text)
            else:  # its end was evicted: an embedding of the whole prompt would not fit
                await runtime.sharing.indexing.remember(node, None)
        finally:
            self.give_up()
            runtime.keeper.release(task.plan)

    def _note_owner(self) -> None:
        """Note the owner of the namespace again: it may have been forgotten since the request came."""
        namespace = self._request.namespace
        owner = Owner(namespace.tenant, namespace.scope, namespace.salt)
        self._server.runtime.keeper.tenants.note(namespace.digest, owner)

    async def _store_prompt(self, task: Task) -> None:
        runtime = self._server.runtime
        try:
            self._note_owner()
            self._node = await runtime.write(runtime.keeper.store_prompt, task.computed_prompt)
            if self._node is None:
                await runtime.sharing.indexing.forget_evicted()
            else:  # without an embedding, which takes long; `store` embeds the prompt
                await runtime.sharing.indexing.remember(self._node, None)
        finally:
            if self._arrival is not None:
                self._arrivals.end(self._arrival, stored=self._node is not None)
            self._prompt_stored.set()

    def _complete(self, task: Task) -> tuple[Node | None, Node | None]:
        """Return the node if it is new or longer, and the node with the prompt. In the writer's thread."""
        keeper, prompt = self._server.runtime.keeper, self._request.prompt
        task.learn()
        if not self._is_storing_prompt:  # the answer ended with its prefill
            self._node = keeper.store_prompt(task.computed_prompt)
        node = keeper.complete(self._node, task.computed, num_prompt=prompt.num_tokens)
        return node, node or keeper.find_stored(task.computed.namespace, prompt.token_ids, task.plan)
