"""Applies a model's chat template and tokenizes, with errors that clients understand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from delta_tree import token_ids
from kvshare.conversation.chat import Chat
from kvshare.conversation.tools import ToolFormat, forms_for_template, tool_format
from kvshare.errors import ContextLengthError, ModelError, RequestError
from kvshare.requests import Prompt
from vector_index import PromptText

_SHORT = 2048  # characters that are tokenized in less than a millisecond; as many token ids
_FEW = 16  # messages
_NORMALISED_AWAY = 4  # a normaliser may remove characters, but leaves at least a quarter of a text
# A template is a program that runs on what a client sends, arguments included, so it may raise any of these.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# Arguments that the server passes itself. The client may set other names, and `documents`.
_RESERVED = signature(PreTrainedTokenizerFast.apply_chat_template).parameters.keys() - {"documents"} | {
    "messages"
}


class PromptEncoder:
    """Turns messages and texts into token ids, with the model's own template and tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._longest_token = max((len(token) for token in self.backend.get_vocab()), default=1)
        self._vocab_size = len(tokenizer)
        self._max_model_len: int | None = None

    def limit_to(self, *, max_model_len: int, vocab_size: int) -> None:
        """Set the limits of the model. After this, far too long texts are rejected before tokenization."""
        self._max_model_len = max_model_len
        self._vocab_size = min(self._vocab_size, vocab_size)

    @classmethod
    def load(cls, path: str | Path) -> PromptEncoder:
        """Load the tokenizer of a model. Raises ModelError if there is no fast one."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, KeyError, ImportError) as exc:
            raise ModelError(f"the tokenizer of {str(path)!r} cannot be loaded: {exc}") from exc
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ModelError(f"{str(path)!r} has a slow tokenizer; expected a fast one (tokenizer.json)")
        return cls(tokenizer)

    @property
    def backend(self) -> Tokenizer:
        backend: Tokenizer = self._tokenizer.backend_tokenizer
        return backend

    @property
    def eos_token_id(self) -> int | None:
        token_id = self._tokenizer.eos_token_id
        return token_id if isinstance(token_id, int) else None

    @property
    def digest(self) -> str:
        """Digest of vocabulary, merges and chat template: if they differ, namespaces differ."""
        digest = hashlib.sha256(self.backend.to_str().encode())
        digest.update(str(self._tokenizer.chat_template).encode())
        return digest.hexdigest()

    @property
    def tool_format(self) -> ToolFormat:
        return tool_format(self._tokenizer.chat_template)

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens that were added to the vocabulary, special ones and others: id by text."""
        added: dict[str, int] = self._tokenizer.get_added_vocab()
        return added

    def render_chat(self, chat: Chat) -> str:
        """
        Return the text of the prompt for the next message, or for the rest of the last one.

        Raises:  RequestError if the template rejects the chat, or `template_kwargs` has a reserved name
        """
        if self._tokenizer.chat_template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        if reserved := sorted(_RESERVED & chat.template_kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs: {reserved[0]} is not an argument of the template; "
                "expected names that the model's chat template reads",
                param="chat_template_kwargs",
            )
        chat = replace(chat, messages=tuple(map(_without_nulls, chat.messages)))
        try:
            return self._rendered(chat)
        except _TEMPLATE_ERRORS as exc:
            param, problem = "messages", _why_rejected(exc, chat)
            if chat.tools and self._takes(replace(chat, tools=())):
                param, problem = "tools", f"the chat template rejects the description of these tools: {exc}"
            raise RequestError(problem, param=param, quoted=[str(exc)]) from exc

    def _takes(self, chat: Chat) -> bool:
        try:
            self._rendered(chat)
        except _TEMPLATE_ERRORS:
            return False
        return True

    def _rendered(self, chat: Chat) -> str:
        """
        Render the first form of the chat that the template accepts and shows as a whole; else the first that
        it accepts.

        If it accepts none, raise the last error: the last form adds least to what the client sent.
        """
        texts, errors = [], []
        for form in forms_for_template(chat, self._tokenizer.chat_template):
            try:
                text = self._rendered_form(form.chat)
            except _TEMPLATE_ERRORS as exc:
                errors.append(exc)
                continue
            if all(shown in text for shown in form.shows):
                return text
            texts.append(text)  # a template may drop what it does not know, or change the text
        if not texts:
            raise errors[-1]
        return texts[0]

    def _rendered_form(self, chat: Chat) -> str:
        options = dict(chat.template_kwargs)
        if chat.tools:
            options["tools"] = [dict(tool) for tool in chat.tools]
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in chat.messages],
            tokenize=False,
            add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
            continue_final_message=chat.continue_final_message,
            **options,
        )
        return str(text)

    def encode_chat(self, chat: Chat) -> Prompt:
        """Make the prompt with the text of `render_chat`, which may raise RequestError."""
        text = self.render_chat(chat)
        last_user = next(
            (str(m.get("content") or "") for m in reversed(chat.messages) if m.get("role") == "user"), ""
        )
        return self._encode(text, PromptText(last_user_turn=last_user, body=text), special=False)

    def encode_text(self, text: str) -> Prompt:
        """Make a plain completion prompt, with the special tokens that the tokenizer adds by itself."""
        return self._encode(text, PromptText(last_user_turn="", body=text), special=True)

    def encode_tokens(self, ids: Sequence[int]) -> Prompt:
        """Make a prompt of these token ids. Raises RequestError if one is not in the vocabulary."""
        self._check_vocabulary(ids, param="prompt")
        array = token_ids(np.asarray(ids, dtype=np.int32))
        body = self.backend.decode(list(ids), skip_special_tokens=True)
        return Prompt(array, PromptText(last_user_turn="", body=body))

    def decode_tokens(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special ones. Raises RequestError as `encode_tokens` does."""
        self._check_vocabulary(ids, param="tokens")
        text: str = self.backend.decode(list(ids), skip_special_tokens=False)
        return text

    def _check_vocabulary(self, ids: Sequence[int], *, param: str) -> None:
        size = self._vocab_size
        if bad := [token_id for token_id in ids if not 0 <= token_id < size]:
            message = f"'{param}': token id {bad[0]} is not in the vocabulary of {size} tokens"
            raise RequestError(message, param=param, quoted=[str(bad[0])])

    def _encode(self, text: str, prompt_text: PromptText, *, special: bool) -> Prompt:
        """Tokenize. Raises ContextLengthError if the text would be too long even with the longest tokens."""
        at_least, limit = len(text) // (_NORMALISED_AWAY * self._longest_token), self._max_model_len
        if limit is not None and at_least > limit:
            raise ContextLengthError(
                num_prompt_tokens=at_least,
                max_tokens=1,
                max_model_len=limit,
                is_bound=True,
                param="prompt" if special else "messages",
            )
        # Unlike `encode`, `encode_batch` releases the GIL, so other requests continue meanwhile.
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=special)
        return Prompt(token_ids(np.asarray(encoding.ids, dtype=np.int32)), prompt_text)


def is_short(text: Chat | str | Sequence[int]) -> bool:
    """
    Return whether tokenizing takes so little that the event loop can wait for it.

    Of a chat only what is plain text is judged: tools, calls and arguments of the template are not short.
    """
    if not isinstance(text, Chat):
        return len(text) <= _SHORT
    if text.tools or text.template_kwargs or len(text.messages) > _FEW:
        return False
    values = [value for message in text.messages for value in message.values()]
    return all(isinstance(value, str) for value in values) and sum(map(len, values)) <= _SHORT


def _without_nulls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Set empty content where there is none, as next to tool calls: some templates would write "None"."""
    return message if message.get("content") is not None else {**message, "content": ""}


def _why_rejected(exc: Exception, chat: Chat) -> str:
    if chat.continue_final_message and isinstance(exc, ValueError):  # its message quotes the chat
        return "the chat template changes the last message or adds text after it, so it cannot be continued"
    return f"the chat template rejects these messages: {exc}"
