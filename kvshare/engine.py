"""
The interface of engines: requests, events and abstract classes, without HTTP and torch.

    Engine               starts, stops, reports its status, and answers and obeys administrators
      ServedEngine         kvshare/runtime.py: what both engines do alike with store, index and sharing core
        VllmEngine           kvshare/fleet/engine.py: vLLMs in other processes; the proxy relays to it
        EmbeddedEngine       kvshare/embedded/engine.py: a model in this process; also a GeneratingEngine
      GeneratingEngine     tokenizes, plans (with `kvshare.sharing`), computes, and emits events

The proxy turns HTTP bodies into `GenerationRequest` and events into chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvshare.admin import (
    Command,
    DiffDocument,
    DiffQuestion,
    EvictionDocument,
    NodeDocument,
    NodeQuestion,
    PinDocument,
    ServerStats,
    StatsQuestion,
    TreeDocument,
    TreeQuestion,
)
from kvshare.conversation.chat import Chat
from kvshare.conversation.lark import Grammar
from kvshare.conversation.tools import ToolFormat
from kvshare.namespace import Namespace, Owner
from kvshare.requests import Prompt, SharingMode, SharingReport, StoredPrompt
from kvshare.settings import Settings
from kvshare.status import EngineStatus, ModelCard
from kvshare.tenants import Tenants


class FinishReason(StrEnum):
    """The reason why a choice ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """
    Parameters of the choice of tokens. Ranges are OpenAI's and vLLM's; the proxy has checked them.

    None stands for the value in the model's generation config, or else for OpenAI's default.
    """

    max_tokens: int | None = None  # None: up to the context length
    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None
    top_k: int | None = None  # 0: all
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None  # what the answer must follow
    skip_special_tokens: bool = True  # False: they stay in the text, as some formats of tool calls need
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None  # None: none; k: the chosen token's and the k likeliest
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """
    One request as the engine sees it.

    The namespace comes from the API key. Of the body only `cache_salt` reaches it, which divides it.
    """

    request_id: str
    namespace: Namespace
    prompt: Prompt
    sampling: SamplingParams
    mode: SharingMode = SharingMode.APPROX
    max_deviation: float | None = None  # nats; counts where it is below that of the settings
    store: bool = True  # False: nothing of this request is stored
    is_controlled: bool = True  # False: it asks to be stored, and the controller leaves it alone
    client: str = ""  # whose request it is: grammars of one client are compiled one after the other
    tenant: str = ""  # and of which tenant: each has its share of slots and queue


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """
    A sampled token with its log-probability and the likeliest alternatives.

    These are the model's own: before penalties, temperature and the mask of a grammar.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    offset: int = 0  # characters of the answer's text before it; of a sampled token


@dataclass(frozen=True, slots=True)
class Started:
    """The first event: the request is admitted and planned. Its own errors are raised before."""

    report: SharingReport
    stored: StoredPrompt  # the engine updates it after the answer


@dataclass(frozen=True, slots=True)
class Delta:
    """
    More text of one choice, and the log-probabilities of the tokens that it consists of. `text` is empty
    where a token ends inside a character, or may begin a stop string.
    """

    choice: int
    text: str
    num_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None  # the stop string that ended the choice; no `text` has it


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event: all choices have ended. `report`: without what was read too late."""

    report: SharingReport
    num_completion_tokens: int
    stage_seconds: Mapping[str, float]  # wait, prefix, fingerprint, embedding, plan, fetch, write, recompute


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """
    Texts as vectors of length 1. Each was read to its end: one that is too long for the embedder is refused.

    Shapes:  vectors (N, D) float32
    """

    model: str  # the embedder's name
    vectors: NDArray[np.float32]
    num_tokens: tuple[int, ...]  # of each text, with the special ones


class Engine(ABC):
    """
    An engine serves one model. All coroutines run on one event loop, which nothing blocks.

    `tenants`: whose its namespaces are. The front notes that and sets the limits.
    """

    def __init__(self) -> None:
        self.tenants = Tenants()

    def reconfigure(self, settings: Settings) -> None:  # noqa: B027  an engine may have nothing to change
        """Go on with these settings, of which only those may differ that can change on a running server."""

    @property
    @abstractmethod
    def card(self) -> ModelCard: ...

    @abstractmethod
    async def start(self) -> None:
        """Open the model, the store and connections. Raises ModelError, StoreError or ConfigError."""

    @abstractmethod
    async def stop(self) -> None:
        """Finish or cancel running requests, and close the store. Idempotent."""

    @abstractmethod
    def status(self) -> EngineStatus: ...

    @abstractmethod
    async def stats(self, question: StatsQuestion) -> ServerStats:
        """Return how much is stored, in all and per namespace, and what plans are priced with."""

    @abstractmethod
    async def tree(self, question: TreeQuestion) -> TreeDocument:
        """Return the stored prompts, below their parents."""

    @abstractmethod
    async def node(self, question: NodeQuestion) -> NodeDocument:
        """Return one stored prompt. Raises RequestError if it is not stored."""

    @abstractmethod
    async def diff(self, question: DiffQuestion) -> DiffDocument:
        """Return the edits between two stored prompts. Raises RequestError if one of them is not stored."""

    @abstractmethod
    async def execute(self, command: Command) -> EvictionDocument | PinDocument:
        """Evict, pin or unpin prompts. Raises RequestError if that cannot be done, and changes nothing."""

    @abstractmethod
    def digests_of(self, owner: Owner) -> Collection[str]:
        """Return the namespaces of an owner's requests: one in each memory that holds KV now."""


class GeneratingEngine(Engine):
    """An engine that computes the answers itself."""

    @property
    @abstractmethod
    def tool_format(self) -> ToolFormat:
        """Return the format in which the model writes tool calls."""

    @property
    @abstractmethod
    def added_tokens(self) -> Mapping[str, int]:
        """Return the tokenizer's added tokens, id by text: a grammar must name them by their ids."""

    @abstractmethod
    def namespace(self, *, tenant: str, scope: str, salt: str = "") -> Namespace:
        """Return the namespace of an `Owner`'s requests under this engine's model and KV layout."""

    def digests_of(self, owner: Owner) -> Collection[str]:
        return (self.namespace(tenant=owner.tenant, scope=owner.scope, salt=owner.salt).digest,)

    @abstractmethod
    async def encode_chat(self, chat: Chat) -> Prompt:
        """Apply the chat template and tokenize. Raises RequestError if the template rejects the chat."""

    @abstractmethod
    async def encode_text(self, text: str) -> Prompt:
        """Tokenize a plain completion prompt."""

    @abstractmethod
    async def encode_tokens(self, token_ids: Sequence[int]) -> Prompt:
        """Return a prompt of these token ids. Raises RequestError if one is outside the vocabulary."""

    @abstractmethod
    async def decode_tokens(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with special ones. Raises RequestError as `encode_tokens` does."""

    @abstractmethod
    async def embed(self, texts: Sequence[str]) -> Embeddings:
        """
        Embed texts. Raises RequestError if no embedder is loaded, or if a text is too long for it, and
        EngineError if it fails.
        """

    @abstractmethod
    async def generate(self, request: GenerationRequest, emit: Callable[[Event], None]) -> None:
        """
        Run a request to its end. Calls `emit` on the event loop with Started, several Delta, and Finished.

        The engine does not wait for slow readers: the caller queues what it cannot send yet. Cancelling frees
        the request's slot at once; a few deltas may still be emitted afterwards.
        Raises, before Started: ContextLengthError, OverloadedError, ShuttingDownError, RequestError;
        after it: EngineError, or RequestError if a grammar of the client's can be followed no further.
        """

    @abstractmethod
    async def explain(self, request: GenerationRequest) -> dict[str, Any]:
        """The plan that this request would get, as a JSON-ready document. Computes and stores nothing."""
