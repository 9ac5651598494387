"""From a request's prompts to what the engine runs: who asks, in which namespace, how much is shared."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Iterable

from aiohttp import web

from kvshare.engines.base import GeneratingEngine, GenerationRequest, SamplingParams
from kvshare.errors import ModelNotFoundError
from kvshare.requests import Prompt
from proxy.request_log import RECORD
from proxy.request_options import KVShareObject, request_options


async def engine_requests(
    request: web.Request,
    engine: GeneratingEngine,
    encoding: Iterable[Awaitable[Prompt]],
    sampling: SamplingParams,
    kvshare: KVShareObject | None,
) -> list[GenerationRequest]:
    """One for each prompt of a body, which is being tokenized. Raises RequestError as the tokenizer does."""
    record, started = request[RECORD], time.perf_counter()
    prompts = [await prompt for prompt in encoding]
    record.tokenize_s = time.perf_counter() - started
    options, owner = request_options(request, kvshare), record.caller.owner
    namespace = engine.namespace(tenant=owner.tenant, scope=owner.scope)
    return [
        GenerationRequest(
            request_id=uuid.uuid4().hex if number else record.unique_id,
            namespace=namespace,
            prompt=prompt,
            sampling=sampling,
            mode=options.mode,
            store=options.store,
        )
        for number, prompt in enumerate(prompts)
    ]


def check_model(engine: GeneratingEngine, name: str | None) -> None:
    """None is whatever is served. Raises ModelNotFoundError."""
    if name not in (None, engine.card.model_id):
        raise ModelNotFoundError(str(name), served=engine.card.model_id)
