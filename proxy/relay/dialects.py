"""
The four routes of vLLM that generate: what differs between them, and how a request becomes a prompt in
tokens, or why it cannot be planned.

vLLM itself renders the body into tokens. If it was started without its `/render` routes, `/tokenize` is
used, which reads fewer members. An unusual request is not planned: vLLM gets it unchanged and reports what
is wrong with it. If vLLM tokenizes a prompt differently in the end, no harm is done: the ticket's digest does
not match then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from delta_tree import TokenIds
from kvshare.fleet.client import RenderedPrompt
from kvshare.fleet.engine import VllmEngine
from kvshare.fleet.token_lists import ids_of
from kvshare.reasons import Reason
from kvshare.requests import Prompt
from kvshare.rules.texts import SHAPES
from kvshare.vllm_protocol.media import are_shareable, identified
from proxy.errors import ErrorReply
from proxy.relay.images import holds_images, is_sent_image, without_tensors
from proxy.relay.media_parts import without_media_ids
from proxy.sse import DONE, frames, named_events
from vector_index import PromptText

Body = Mapping[str, Any]


class Unplannable(Exception):
    """A request must be relayed without a plan, for `reason`."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Dialect:
    """One generating route of vLLM."""

    path: str
    tokenized: tuple[str, ...] = ()  # members of a body that `/tokenize` reads in the same way
    first_token: bytes = b""  # bytes that a stream has once it has a token; empty: any byte
    check: Callable[[Body], None] = lambda document: None  # raises Unplannable
    takes_rendered: Callable[[Body], bool] = lambda document: True  # see `ReadPrompt`

    def text_of(self, document: Body) -> PromptText:
        """Return the text of a body; `kvshare.rules.texts` says where it is. Raises Unplannable."""
        self.check(document)
        shape = SHAPES[self.path]
        if shape.messages is None:
            prompt = _only_prompt(document)
            return PromptText(last_user_turn="", body=prompt if isinstance(prompt, str) else "")
        turns = document.get(shape.messages)
        if isinstance(turns, str):
            turns = [{"role": "user", "content": turns}]
        if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
            raise Unplannable(Reason.MALFORMED)
        texts = [_text(turn.get("content", turn.get("output"))) for turn in turns]
        users = [text for text, turn in zip(texts, turns, strict=True) if turn.get("role") == "user"]
        before = [_text(document.get(name)) for name in shape.texts]
        body = "\n".join(text for text in (*before, *texts) if text)
        return PromptText(last_user_turn=users[-1] if users else "", body=body)

    def broken_off(self, reply: ErrorReply, request_id: str) -> bytes:
        """Return the end of a stream that breaks off. It begins with a blank line, to end a partial event."""
        if self is MESSAGES:
            return b"\n\n" + named_events(reply.anthropic_body(request_id))
        if self is RESPONSES:  # with a member `error`, so that the openai client raises
            error = {"type": "error", "code": reply.code, "message": reply.message, "param": reply.param}
            return b"\n\n" + named_events({**error, **reply.body})
        return b"\n\n" + frames(reply.body) + DONE


# Types of parts, and the member that has their text, if any. Parts of other types are images, files, ...
_TEXT_AT = {
    **dict.fromkeys(("text", "input_text", "output_text", "reasoning_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_result": "content",
    **dict.fromkeys(("tool_use", "tool_reference", "tool_addition", "tool_removal"), ""),
    "redacted_thinking": "",
}


def _text(content: object) -> str:
    """Return the text of a content, which may have parts. Raises Unplannable if it has more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence):
        return "".join(map(_text, content))
    if not isinstance(content, Mapping) or (place := _TEXT_AT.get(str(content.get("type")))) is None:
        if isinstance(content, Mapping) and is_sent_image(content):
            return ""
        raise Unplannable(Reason.MULTIMODAL)
    return _text(content.get(place))


def _check_response(document: Body) -> None:
    if document.get("previous_response_id") is not None:
        raise Unplannable(Reason.PREVIOUS_RESPONSE)  # vLLM has the rest of the prompt
    if document.get("background"):
        raise Unplannable(Reason.BACKGROUND)  # it goes on after its response has ended


def _check_completion(document: Body) -> None:
    for reason in (Reason.PROMPT_EMBEDS, Reason.SUFFIX):  # these reasons have the names of the members
        if document.get(reason) is not None:
            raise Unplannable(reason)
    if document.get("echo") and document.get("logprobs") is not None:
        raise Unplannable(Reason.PROMPT_LOGPROBS)


def _thinks_as_rendered(document: Body) -> bool:
    """Return false if thinking is disabled: then the route may use other tokens than `/render` gives."""
    thinking = document.get("thinking")
    return not (isinstance(thinking, Mapping) and thinking.get("type") == "disabled")


def _only_prompt(document: Body) -> str | list[Any]:
    """Return a completion's prompt, text or tokens, also from a list of one. Raises Unplannable."""
    prompt = document.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise Unplannable(Reason.SEVERAL_PROMPTS)
        prompt = prompt[0]
    if not isinstance(prompt, str | list):
        raise Unplannable(Reason.MALFORMED)
    return prompt


@dataclass(frozen=True, slots=True, eq=False)
class ReadPrompt:
    """A request's prompt. `rendered`: what vLLM rendered, if its answer is the same when given that."""

    prompt: Prompt
    rendered: RenderedPrompt | None = None


async def prompt_of(document: Body, body: bytes, *, dialect: Dialect, engine: VllmEngine) -> ReadPrompt:
    """
    Read the prompt of a request. `document`: its parsed body; `body`: the sanitized bytes that vLLM will get.

    Raises:  Unplannable; NoReplicaError, UpstreamError, also if the token ids are invalid
    """
    text = dialect.text_of(document)
    _check_usual(document, engine)
    has_images = holds_images(document)
    if has_images and not engine.fleet.shares_media:
        raise Unplannable(Reason.MULTIMODAL)
    if dialect is COMPLETION and (given := _given_tokens(document)) is not None:
        return ReadPrompt(Prompt(given, text))
    renderer = engine.server.renderer
    rendered = await renderer.render(dialect.path, without_tensors(body) if has_images else body)
    if rendered is None:
        if has_images:
            raise Unplannable(Reason.NO_RENDER)
        tokenized = await renderer.tokenize(
            _tokenize_body(without_media_ids(document, path=dialect.path), dialect)
        )
        return ReadPrompt(Prompt(tokenized.token_ids, text))
    if len(rendered) != 1:
        raise Unplannable(Reason.SEVERAL_PROMPTS)
    media, tokens = rendered[0].media, rendered[0].tokens.token_ids
    if media is None or not are_shareable(media, len(tokens)):
        raise Unplannable(Reason.MULTIMODAL)
    if media:  # vLLM takes no tokens back together with media
        spans = tuple(medium.span for medium in media)
        return ReadPrompt(Prompt(identified(tokens, media), text, spans))
    return ReadPrompt(Prompt(tokens, text), rendered[0] if dialect.takes_rendered(document) else None)


def _given_tokens(document: Body) -> TokenIds | None:
    """Return a prompt that was sent as tokens and is not to be truncated; else None. Raises Unplannable."""
    prompt = _only_prompt(document)
    if isinstance(prompt, str) or document.get("truncate_prompt_tokens") is not None:
        return None
    try:
        return ids_of(prompt)
    except ValueError as exc:
        raise Unplannable(Reason.MALFORMED) from exc


def _check_usual(document: Body, engine: VllmEngine) -> None:
    """Raise Unplannable if the KV is not the base model's, or vLLM computes all of it anyway."""
    model, served = document.get("model"), engine.fleet.models
    if model is not None and (served is None or model not in served.names):
        raise Unplannable(Reason.ADAPTER)  # or a model that is not there
    if document.get("prompt_logprobs") is not None:
        raise Unplannable(Reason.PROMPT_LOGPROBS)
    if document.get("use_beam_search"):
        raise Unplannable(Reason.BEAM_SEARCH)


def _tokenize_body(document: Body, dialect: Dialect) -> dict[str, Any]:
    """Make the body for vLLM's `/tokenize`, which reads chats and plain prompts only. Raises Unplannable."""
    if not dialect.tokenized:
        raise Unplannable(Reason.NO_RENDER)
    if document.get("truncate_prompt_tokens") is not None:
        raise Unplannable(Reason.TRUNCATED)
    body = {key: document[key] for key in dialect.tokenized if document.get(key) is not None}
    if dialect is COMPLETION:
        return {**body, "prompt": _only_prompt(document)}
    # The chat route adds to `chat_template_kwargs`, and `/tokenize` does not.
    given = document.get("chat_template_kwargs")
    kwargs = dict(given) if isinstance(given, Mapping) else {}
    effort = document.get("reasoning_effort")
    if effort is not None and "enable_thinking" not in kwargs:
        kwargs["enable_thinking"] = effort != "none"
    for name in ("documents", "reasoning_effort"):
        if document.get(name) not in (None, "auto"):
            kwargs[name] = document[name]
    return {**body, "chat_template_kwargs": kwargs} if kwargs else body


CHAT = Dialect(
    "/v1/chat/completions",
    tokenized=(
        *("model", "messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("add_special_tokens", "chat_template", "chat_template_kwargs"),
    ),
)
COMPLETION = Dialect(
    "/v1/completions",
    tokenized=("model", "add_special_tokens"),
    check=_check_completion,
    takes_rendered=lambda document: False,
)
# A response begins at once with events that have no token.
_FIRST_ITEM = b"event: response.output_item.added"
RESPONSES = Dialect("/v1/responses", first_token=_FIRST_ITEM, check=_check_response)
MESSAGES = Dialect("/v1/messages", takes_rendered=_thinks_as_rendered)
DIALECTS = {dialect.path: dialect for dialect in (CHAT, COMPLETION, RESPONSES, MESSAGES)}
