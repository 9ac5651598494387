"""
For each API the parameters that this server does not implement and that would change the answer if it ignored
them.

What only hints (`user`, `metadata`, `store`, `prompt_cache_key`, `service_tier`, `verbosity` ...) passes;
vLLM's hints are listed, so that none of its parameters is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from kvshare.errors import UnsupportedParameterError


@dataclass(frozen=True, slots=True)
class _Parameter:
    neutral: tuple[object, ...]  # the values that ask for nothing
    instead: str | None  # what to do, in place of the API's own words


@dataclass(frozen=True, slots=True)
class UnsupportedParameters:
    """Unsupported parameters of an API. `hints` are ignored: the answer is the same without them."""

    instead: str
    refused: Mapping[str, _Parameter]
    hints: Set[str]

    def refuse(self, parameters: Mapping[str, Any]) -> None:
        """Raises UnsupportedParameterError for the first parameter that asks for what is not there."""
        for name, row in self.refused.items():
            value = parameters.get(name)
            same_type = [each for each in row.neutral if isinstance(each, bool) == isinstance(value, bool)]
            if value is not None and value not in same_type:  # true and 1 would be equal
                raise UnsupportedParameterError(name, row.instead or self.instead)


def passes(*neutral: object, instead: str | None = None) -> _Parameter:
    """A parameter that passes with these values, and is refused with others."""
    return _Parameter(neutral, instead)


_EMPTY: tuple[object, ...] = (False, 0, "", [], {})
_SERVE_VLLM = "this engine does not implement it; leave it out, or serve with `--engine vllm`"
_SEND_ALL = "this server stores no responses; send the whole conversation as 'input'"
_HINTS = {
    *("user", "request_id", "session_id", "priority", "stream_interval"),
    *("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs"),  # refused where they stand
    "truncation_side",  # says where to cut if `truncate_prompt_tokens` asks for it
}
# what chats and completions have in common
_GENERATION = {
    # OpenAI
    "modalities": passes(["text"]),
    "audio": passes(),
    "web_search_options": passes(),
    "suffix": passes(""),
    # vLLM's additions
    "length_penalty": passes(1),
    "use_beam_search": passes(False),
    "include_stop_str_in_output": passes(False),
    "bad_words": passes([]),
    "documents": passes([]),
    "allowed_token_ids": passes(),
    "prompt_logprobs": passes(),
    "logprob_token_ids": passes(),
    "chat_template": passes(),
    "guided_regex": passes(),
    "guided_choice": passes(),
    "guided_grammar": passes(),
    "guided_whitespace_pattern": passes(),
    "truncate_prompt_tokens": passes(),
    "prompt_embeds": passes(),
    "logits_processors": passes([]),
    "thinking_token_budget": passes(-1),
    "repetition_detection": passes(),
    "watermarking": passes(False),
    "spaces_between_special_tokens": passes(True),
    "vllm_xargs": passes({}),
    "kv_transfer_params": passes({}),
    "ec_transfer_params": passes({}),
    "return_token_ids": passes(False),
    "return_tokens_as_token_ids": passes(False),
    "return_token_offsets": passes(False),
    "routed_experts_prompt_start": passes(0),
}
CHAT = UnsupportedParameters(
    _SERVE_VLLM,
    {
        **_GENERATION,
        "include_reasoning": passes(True),
        "echo": passes(
            False,
            instead="of /v1/completions only; to continue an assistant's message send "
            "'continue_final_message': true",
        ),
        "add_special_tokens": passes(False, instead="the special tokens of a chat are in its template"),
        "return_prompt_text": passes(False),
    },
    hints=_HINTS,
)
COMPLETIONS = UnsupportedParameters(
    _SERVE_VLLM,
    {
        **_GENERATION,
        "add_special_tokens": passes(
            True, instead="a text has them; to be without them send the prompt's token ids"
        ),
    },
    hints=_HINTS,
)
MESSAGES = UnsupportedParameters(
    "not implemented by this server",
    {
        "container": passes(*_EMPTY),
        "mcp_servers": passes(*_EMPTY),
        "watermarking": passes(False),
        "vllm_xargs": passes(*_EMPTY),
        "kv_transfer_params": passes(*_EMPTY),
        "ec_transfer_params": passes(*_EMPTY),
        "chat_template_kwargs": passes(
            {},
            instead="not implemented for messages: 'thinking' and 'output_config.effort' reach the template; "
            "use /v1/chat/completions for others",
        ),
    },
    hints={"metadata", "mm_payload", "return_mm_kwargs"},
)
RESPONSES = UnsupportedParameters(
    "not implemented for responses; use /v1/chat/completions",
    {
        "previous_response_id": passes(*_EMPTY, instead=_SEND_ALL),
        "conversation": passes(*_EMPTY, instead=_SEND_ALL),
        "prompt": passes(*_EMPTY, instead="this server stores no prompts; send 'instructions' and 'input'"),
        "background": passes(
            *_EMPTY, instead="this server answers while the client waits; leave it out or stream"
        ),
        "moderation": passes(*_EMPTY, instead="not implemented by this server"),
        "top_logprobs": passes(*_EMPTY),
        # vLLM's additions
        "logit_bias": passes({}),
        "top_k": passes(-1, 0),
        "min_p": passes(0),
        "presence_penalty": passes(0),
        "frequency_penalty": passes(0),
        "repetition_penalty": passes(1),
        "seed": passes(-1),
        "stop": passes("", []),
        "stop_token_ids": passes([]),
        "ignore_eos": passes(False),
        "skip_special_tokens": passes(True),
        "include_stop_str_in_output": passes(False),
        "include_reasoning": passes(True),
        "structured_outputs": passes({}, instead="not implemented for responses; use 'text.format'"),
        "chat_template_kwargs": passes(
            {},
            instead="not implemented for responses: 'reasoning.effort' reaches the template; "
            "use /v1/chat/completions for others",
        ),
        "previous_input_messages": passes([], instead=_SEND_ALL),
        "enable_response_messages": passes(False),
        "watermarking": passes(False, instead=_SERVE_VLLM),
        "vllm_xargs": passes({}, instead=_SERVE_VLLM),
        "kv_transfer_params": passes({}, instead=_SERVE_VLLM),
        "ec_transfer_params": passes({}, instead=_SERVE_VLLM),
    },
    hints={
        *("metadata", "service_tier", "store", "user", "prompt_cache_key", "request_id", "session_id"),
        *("priority", "media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs"),
        "max_tool_calls",  # of tools that run on OpenAI's servers
    },
)
EMBEDDINGS = UnsupportedParameters(
    "the embedder reads texts as they are; leave it out",
    {
        "truncate_prompt_tokens": passes(
            instead="a text that is too long is refused; cut it before you send it"
        ),
        "messages": passes(instead="this server embeds texts: send 'input'"),
        "padding": passes("do_not_pad"),
        "add_special_tokens": passes(True),
        "embed_dtype": passes("float32", instead="only float32"),
        "endianness": passes("native", "little", instead="only little"),
        "use_activation": passes(True, instead="vectors have length 1 here"),
    },
    hints={"user", "request_id", "priority", "mm_processor_kwargs", "truncation_side"},
)
