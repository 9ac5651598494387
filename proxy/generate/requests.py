"""From a request's body to what the engine runs: who asks, in which namespace, how much is shared."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from aiohttp import web

from kvshare.conversation.chat import Chat
from kvshare.conversation.grammar import grammar_of
from kvshare.conversation.parser import AnswerParser, parser_for
from kvshare.engines.base import GeneratingEngine, GenerationRequest, SamplingParams
from kvshare.errors import ModelNotFoundError
from kvshare.requests import Prompt
from proxy.generate.fields import Body
from proxy.request_body import read_object, validated
from proxy.request_history import stored_documents
from proxy.request_log import RECORD
from proxy.request_options import KVShareField, request_options

ENGINE: web.AppKey[GeneratingEngine] = web.AppKey("generating_engine", GeneratingEngine)

_Body = TypeVar("_Body", bound=Body)


class ChatBody(Protocol):
    """A checked body, whichever API it came by, that asks for an answer to a chat."""

    @property
    def chat(self) -> Chat: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def kvshare(self) -> KVShareField: ...


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat as the engine sees it; each of its choices is read by a parser of its own."""

    generation: GenerationRequest
    new_parser: Callable[[], AnswerParser]
    is_plain: bool  # nothing may be called, and the prompt does not end inside of thoughts


async def read_body(request: web.Request, model: type[_Body]) -> _Body:
    """The body as a `model`. Raises RequestError, ModelNotFoundError, and HttpError as `read_object` does."""
    document = await read_object(request)
    body = validated(model, document)
    check_model(request.app[ENGINE], document.get("model"))
    return body


def check_model(engine: GeneratingEngine, name: str | None) -> None:
    """None is whatever is served. Raises ModelNotFoundError."""
    if name not in (None, engine.card.model_id):
        raise ModelNotFoundError(str(name), served=engine.card.model_id)


async def chat_request(request: web.Request, body: ChatBody) -> ChatRequest:
    """Raises RequestError if the template refuses the chat, or nothing can follow its schemas."""
    engine, chat, sampling = request.app[ENGINE], body.chat, body.sampling
    fmt = engine.tool_format
    (generation,) = await engine_requests(request, [engine.encode_chat(chat)], sampling, body.kvshare)
    reasons = generation.prompt.text.body.rstrip().endswith("<think>")
    sampling = replace(
        sampling,
        grammar=grammar_of(chat, fmt, added_tokens=engine.added_tokens, reasons=reasons),
        # Some models' calls begin with a special token.
        skip_special_tokens=sampling.skip_special_tokens and not chat.may_call,
    )
    return ChatRequest(
        replace(generation, sampling=sampling),
        partial(parser_for, chat, fmt, reasons=reasons),
        is_plain=not chat.may_call and not reasons,
    )


async def engine_requests(
    request: web.Request,
    encoding: Iterable[Awaitable[Prompt]],
    sampling: SamplingParams,
    kvshare: KVShareField,
) -> list[GenerationRequest]:
    """One for each prompt of a body, which is being tokenized. Raises RequestError as the tokenizer does."""
    record, started = request[RECORD], time.perf_counter()
    prompts = [await prompt for prompt in encoding]
    record.tokenize_s = time.perf_counter() - started
    options, owner = request_options(request, kvshare), record.caller.owner
    namespace = request.app[ENGINE].namespace(tenant=owner.tenant, scope=owner.scope)
    requests = [
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
    record.executed = partial(stored_documents, [entry.stored for entry in requests])
    return requests
