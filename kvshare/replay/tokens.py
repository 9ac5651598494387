"""
Logged requests -> requests in tokens, a batch at a time.

Takes any fast Hugging Face tokenizer, by folder with its chat template or as a `tokenizer.json`; by default
the default chat model's. Messages without a template, or that it rejects (an unknown role, the assistant
first), are written plainly: role, line break, text. Block hashes become random tokens, equal for equal
hashes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from delta_tree import TokenIds, token_ids
from kvshare.conversation.chat import Chat
from kvshare.errors import LogError, ModelError, RequestError
from kvshare.logs.requests import LoggedRequest, Message
from kvshare.replay.requests import TokenizedRequest, batches
from kvshare.served_model import DEFAULT, DEMO, find_model
from vector_index.prompt_text import WINDOW_CHARS

if TYPE_CHECKING:
    from kvshare.embedded.tokenizer import PromptEncoder

_BATCH = 64
_ELLIPSIS = "\n"


class RequestTokenizer:
    def __init__(self, backend: Tokenizer, *, encoder: PromptEncoder | None = None, name: str = "") -> None:
        self.name = name
        self._backend = backend
        self._backend.no_truncation()  # some tokenizers come with a limit switched on
        self._backend.no_padding()
        self._encoder = encoder
        self._num_tokens = backend.get_vocab_size()

    @classmethod
    def load(cls, path: str | Path | None = None) -> Self:
        """
        A `tokenizer.json`, or what `model.path` may be. None: the default chat model's, downloaded once.

        Raises:  ModelError
        """
        if path is not None and Path(path).is_file():
            try:
                return cls(Tokenizer.from_file(str(path)), name=Path(path).name)
            except Exception as exc:
                raise ModelError(f"{Path(path).name} is not a tokenizer.json: {exc}") from exc
        try:
            model = find_model(DEFAULT if path is None else str(path), download=True)
        except ModelError as exc:
            raise ModelError(
                f"the default tokenizer is not available ({exc}); pass one with --tokenizer "
                f"({DEMO}: the bundled forms model's, of 1,536 tokens)"
            ) from exc
        # It imports transformers, and that torch: seconds that a tokenizer.json does without.
        from kvshare.embedded.tokenizer import PromptEncoder

        encoder = PromptEncoder.load(model.path)
        return cls(encoder.backend, encoder=encoder, name=model.name)

    @property
    def digest(self) -> str:
        """Return the digest of vocabulary and template."""
        if self._encoder is not None:
            return self._encoder.digest
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def punctuation_ids(self) -> frozenset[int]:
        """Tokens without any letter or digit, in any script."""
        texts = self._backend.decode_batch([[number] for number in range(self._num_tokens)])
        return frozenset(
            number
            for number, text in enumerate(texts)
            if not any(map(str.isalnum, text)) and "\ufffd" not in text
        )

    def tokenize(self, requests: Iterable[LoggedRequest]) -> Iterator[TokenizedRequest]:
        """
        Yield the same requests in the same order, with times that never decrease; 0.0 until one has a time.

        Raises LogError for a request without content.
        """
        index, time_s = itertools.count(), 0.0
        for batch in batches(requests, _BATCH):
            answers = self._encode([request.answer or "" for request in batch], special=False)
            for request, prompt, answer in zip(batch, self._prompts(batch), answers, strict=True):
                time_s = max(time_s, time_s if request.time_s is None else request.time_s)
                yield TokenizedRequest(next(index), request, prompt, answer, embedder_text(request), time_s)

    def _prompts(self, batch: Sequence[LoggedRequest]) -> Iterator[TokenIds]:
        """Texts of one kind are encoded together, on several cores."""
        layouts = [self._render(one.messages) for one in batch if one.messages is not None]
        prompts = [one.prompt for one in batch if one.prompt is not None]
        chats = iter(self._encode(layouts, special=False))
        texts = iter(self._encode(prompts, special=True))
        for request in batch:
            if request.messages is not None:
                yield next(chats)
            elif request.prompt is not None:
                yield next(texts)
            elif request.token_ids is not None:
                yield token_ids(np.asarray(request.token_ids, dtype=np.int32))
            elif request.block_hashes is not None:
                yield block_tokens(request, num_tokens=self._num_tokens)
            else:
                raise LogError(f"{request.source}, line {request.line}: a request without text or token ids")

    def _render(self, messages: Sequence[Message]) -> str:
        if self._encoder is not None:
            with suppress(RequestError):  # a template that does not take these messages
                return self._encoder.render_chat(Chat(tuple(messages)))
        return plain_layout(messages)

    def _encode(self, texts: Sequence[str], *, special: bool) -> list[TokenIds]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=special)
        return [token_ids(np.asarray(encoding.ids, dtype=np.int32)) for encoding in encodings]


def plain_layout(messages: Sequence[Message]) -> str:
    """Return a prompt where there is no chat template."""
    turns = (f"{message['role']}\n{message['content'].strip()}\n\n" for message in messages)
    return "".join(turns) + "assistant\n"


def block_tokens(request: LoggedRequest, *, num_tokens: int) -> TokenIds:
    """
    Random tokens in [0, num_tokens), equal for equal hashes; the last block is cut.

    A hash of a Mooncake trace covers everything up to its block, so equal text after another prefix has
    another hash: such a trace shows sharing of prefixes only.
    """
    hashes = np.asarray(request.block_hashes, dtype=np.uint64)[:, None]
    places = np.arange(request.block_size, dtype=np.uint64)[None, :]
    mixed = _mixed(hashes * np.uint64(request.block_size) + places)
    ids = (mixed % np.uint64(num_tokens)).astype(np.int32).reshape(-1)
    return token_ids(ids[: request.num_tokens])


def embedder_text(request: LoggedRequest) -> str:
    """
    Return the text that distinguishes the prompt, in as many characters as an embedder reads.

    The last user turn, of a long one its head and tail; a short one is followed by the ends of the messages
    before it. The system prompt is left out.
    """
    if request.prompt is not None:
        return _head_and_tail(request.prompt.strip(), WINDOW_CHARS)
    messages = request.messages or ()
    asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
    last = asked[-1] if asked else len(messages) - 1
    text = _head_and_tail(messages[last]["content"].strip(), WINDOW_CHARS) if messages else ""
    for message in reversed(messages[: max(last, 0)]):
        room = WINDOW_CHARS - len(text) - len(_ELLIPSIS)
        if room <= 0:
            break
        if message["role"] != "system" and (said := message["content"].strip()):
            text += _ELLIPSIS + said[-room:]
    return text


def _head_and_tail(text: str, num_chars: int) -> str:
    if len(text) <= num_chars:
        return text
    half = (num_chars - len(_ELLIPSIS)) // 2
    return text[:half] + _ELLIPSIS + text[-half:]


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64: adjacent numbers give unrelated ones."""
    with np.errstate(over="ignore"):
        mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
