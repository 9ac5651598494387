"""
The error tree of KVShare: every error that `kvshare` or `proxy` raises on purpose.

* KVShareError
  x ConfigError                 config.yaml: the key path, the value found, what was expected
  x MissingExtraError           a command needs libraries that are not installed; names the extra
  x ModelError                  a model that cannot be loaded or served
    - UnshareableError          the model can be served, but its KV cannot be shared
  x StoreError                  the metadata store cannot be used; says what to do
  x LogError                    a log cannot be replayed: missing, unknown format, or without text
  x RequestError                the request is wrong; carries an OpenAI `param` and `code`
    - ContextLengthError
    - UnsupportedParameterError
    - UnsupportedFormatError    no answer can be held to this schema or grammar
    - ModelNotFoundError
  x OverloadedError             the queue is full; try again
  x ShuttingDownError           the engine drains
  x EngineError                 the engine failed while computing
  x UpstreamError               a vLLM replica does not answer, or its answer is wrong
  x NoReplicaError              no vLLM replica can take a request now
  x UnreachableError            no server answers at the URL given to a command

A refused sharing plan is not an error: it is `NoPlan(reason)`. The packages below raise their own errors
(`DeltaTreeError`, `VectorIndexError`), which `kvshare` translates where it calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum, auto

_MAX_QUOTED = 100  # characters of a client's value in an error message


class ErrorCode(StrEnum):
    """The `code` of every error that a client can get; docs/reference.md explains each."""

    # The request is wrong.
    BAD_PATH = auto()
    BAD_REQUEST = auto()
    CONTEXT_LENGTH_EXCEEDED = auto()
    MODEL_NOT_FOUND = auto()
    NO_EMBEDDER = auto()
    REQUEST_TIMEOUT = auto()
    REQUEST_TOO_LARGE = auto()
    UNKNOWN_PARAMETER = auto()
    UNSUPPORTED_FORMAT = auto()
    UNSUPPORTED_MEDIA_TYPE = auto()
    UNSUPPORTED_PARAMETER = auto()
    # The route does not exist, or this key may not use it.
    INVALID_API_KEY = auto()
    METHOD_NOT_ALLOWED = auto()
    NOT_FOUND = auto()
    PERMISSION_DENIED = auto()
    # Admin routes.
    KV_NOT_AT_HAND = auto()
    NAMESPACE_MISMATCH = auto()
    NAMESPACE_NOT_FOUND = auto()
    NODE_NOT_FOUND = auto()
    NODE_PINNED = auto()
    TOO_MUCH_PINNED = auto()
    # A tenant has reached a limit of its own.
    RATE_LIMIT_EXCEEDED = auto()
    TENANT_BUSY = auto()
    # Settings that were to change on a running server.
    INVALID_SETTINGS = auto()
    # The server cannot answer now, or failed.
    ENGINE_ERROR = auto()
    INTERNAL_ERROR = auto()
    NO_REPLICA = auto()
    NOT_READY = auto()
    QUEUE_FULL = auto()
    SHUTTING_DOWN = auto()
    UPSTREAM_ERROR = auto()
    UPSTREAM_TIMEOUT = auto()


class KVShareError(Exception):
    """Root of all errors raised on purpose."""


class ConfigError(KVShareError):
    """Settings are unknown, missing or of the wrong type. `key_path`: of the first one."""

    def __init__(self, key_path: str, problem: str, *others: tuple[str, str]) -> None:
        """`others`: key paths and problems of further settings; each gets a line."""
        super().__init__("\n".join(": ".join(each) for each in ((key_path, problem), *others)))
        self.key_path = key_path


class MissingExtraError(KVShareError):
    """Libraries that an extra of KVShare brings are not installed."""


class ModelError(KVShareError):
    """A model cannot be loaded or used."""


class UnshareableError(ModelError):
    """A model stores KV or attends in a way that sharing does not support."""


class StoreError(KVShareError):
    """The metadata store is corrupt, or belongs to another model or version."""


class LogError(KVShareError):
    """A log file cannot be replayed at all; a single bad row is counted, not raised."""


class RequestError(KVShareError):
    """The request is wrong and cannot be served."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: ErrorCode | None = None,
        quoted: Sequence[str] = (),
    ) -> None:
        """`quoted`: the client's own text in `message` and `param`, which logs leave out."""
        super().__init__(message)
        self.param = param
        self.code = code
        self.quoted = quoted


class ContextLengthError(RequestError):
    """
    Prompt and completion do not fit the model's context.

    `is_bound`: the prompt was too long to be counted; it has `num_prompt_tokens` tokens or more.
    """

    def __init__(
        self,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        max_model_len: int,
        is_bound: bool = False,
        param: str = "messages",
    ) -> None:
        limit = f"This model's maximum context length is {max_model_len} tokens. However, you requested"
        if is_bound:
            message = (
                f"{limit} at least {num_prompt_tokens} tokens in the prompt alone, which was not counted to "
                "its end. Please reduce its length."
            )
        else:
            message = (
                f"{limit} {num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the messages, "
                f"{max_tokens} in the completion). Please reduce the length of the messages or completion."
            )
        super().__init__(message, param=param, code=ErrorCode.CONTEXT_LENGTH_EXCEEDED)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        self.is_bound = is_bound


class UnsupportedParameterError(RequestError):
    """A parameter that this engine does not implement. It is never silently ignored."""

    def __init__(self, param: str, detail: str) -> None:
        super().__init__(
            f"Unsupported parameter: '{param}': {detail}", param=param, code=ErrorCode.UNSUPPORTED_PARAMETER
        )


class UnsupportedFormatError(RequestError):
    """A schema or grammar that no answer can be held to, found before the answer or in its middle."""

    def __init__(self, reason: str, param: str | None) -> None:
        super().__init__(
            f"the answer cannot be constrained to this format: {reason}; use a simpler schema, or none",
            param=param,
            code=ErrorCode.UNSUPPORTED_FORMAT,
            quoted=[reason],
        )


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""

    def __init__(self, model: str, *, served: str) -> None:
        shown = model if len(model) <= _MAX_QUOTED else f"{model[:_MAX_QUOTED]}…"
        super().__init__(
            f"The model '{shown}' is not served here: expected '{served}'. GET /v1/models lists what is.",
            param="model",
            code=ErrorCode.MODEL_NOT_FOUND,
        )


class OverloadedError(KVShareError):
    """The waiting queue is full."""


class ShuttingDownError(KVShareError):
    """The engine is stopping and takes no new requests."""


class EngineError(KVShareError):
    """The engine failed while computing, so the request cannot be finished."""


class UpstreamError(KVShareError):
    """A replica or its control server does not answer, or wrongly. `status`: the HTTP status if not 200."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class WrongServerError(UpstreamError):
    """A KVShare server, this one or another, answers where a vLLM or its connector was expected."""


class NoReplicaError(KVShareError):
    """No vLLM replica answers now; try again."""


class UnreachableError(KVShareError):
    """No server answers at the URL."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"cannot reach {url}: {problem}; is `kvshare serve` running there?")
        self.url = url
        self.problem = problem
