"""Makes engine requests of bodies: who asks, in which namespace, and how much is shared."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

from aiohttp import web

from kvshare.conversation.chat import Chat
from kvshare.conversation.grammar import grammar_of, may_have_grammar
from kvshare.conversation.parser import AnswerParser, parser_for
from kvshare.engine import GeneratingEngine, GenerationRequest, SamplingParams
from kvshare.errors import ModelNotFoundError
from kvshare.requests import Prompt
from proxy.generate.fields import Body
from proxy.request_body import KVShareField, is_controlled, read_object, request_options, validated
from proxy.request_record import RECORD, client_of

ENGINE: web.AppKey[GeneratingEngine] = web.AppKey("generating_engine", GeneratingEngine)

_Body = TypeVar("_Body", bound=Body)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat as the engine sees it; each of its choices is read by a parser of its own."""

    generation: GenerationRequest
    new_parser: Callable[[], AnswerParser]
    is_plain: bool  # nothing may be called, and the prompt does not end inside of thoughts
    model: str  # the name of the one that answers
    client_request_id: str  # as the answer's headers have it


async def read_body(request: web.Request, model: type[_Body]) -> _Body:
    """The body as a `model`. Raises RequestError, ModelNotFoundError, and HttpError as `read_object` does."""
    document = await read_object(request)
    body = validated(model, document)
    check_model(request.app[ENGINE], document.get("model"))
    return body


def check_model(engine: GeneratingEngine, name: str | None) -> None:
    """Raise ModelNotFoundError unless this model is served. None: any model."""
    if name not in (None, engine.card.model_id):
        raise ModelNotFoundError(str(name), served=engine.card.model_id)


async def chat_request(
    request: web.Request, chat: Chat, sampling: SamplingParams, kvshare: KVShareField
) -> ChatRequest:
    """Raises RequestError if the template refuses the chat, or nothing can follow its schemas."""
    engine = request.app[ENGINE]
    fmt = engine.tool_format
    (generation,) = await engine_requests(request, [engine.encode_chat(chat)], sampling, kvshare)
    in_reasoning = generation.prompt.text.body.rstrip().endswith("<think>")
    grammar = None
    if may_have_grammar(chat):  # in a thread: reading the largest schemas takes a second
        grammar = await asyncio.to_thread(
            grammar_of, chat, fmt, added_tokens=engine.added_tokens, in_reasoning=in_reasoning
        )
    sampling = replace(
        sampling,
        grammar=grammar,
        # Some models' calls begin with a special token.
        skip_special_tokens=sampling.skip_special_tokens and not chat.may_call,
    )
    return ChatRequest(
        replace(generation, sampling=sampling),
        partial(parser_for, chat, fmt, in_reasoning=in_reasoning),
        is_plain=not chat.may_call and not in_reasoning,
        model=engine.card.model_id,
        client_request_id=request[RECORD].request_id,
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
    record.preparation.tokenize_s = time.perf_counter() - started
    options = request_options(request, kvshare)
    engine = request.app[ENGINE]
    namespace = engine.namespace(**asdict(record.owner))
    engine.tenants.note(namespace.digest, record.owner)
    return [
        GenerationRequest(
            request_id=uuid.uuid4().hex if number else record.unique_id,
            namespace=namespace,
            prompt=prompt,
            sampling=sampling,
            mode=options.mode,
            max_deviation=options.max_deviation,
            store=options.may_store,
            is_controlled=is_controlled(kvshare),
            client=client_of(request),
            tenant=record.admission.caller.tenant,
        )
        for number, prompt in enumerate(prompts)
    ]
