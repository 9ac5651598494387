"""The problems that parts of a server may have: for each the part's state, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto


class PartState(StrEnum):
    OK = auto()
    REDUCED = auto()  # it does less than it could
    OFF = auto()  # it does nothing: requests are served without it


@dataclass(frozen=True, eq=False)
class _ProblemRow:
    state: PartState
    text: str  # what is wrong; a reading may add details
    remedy: str
    is_logged: bool = False  # by `PartHistory`, as the part's owner does not log when it begins and ends


_Row = tuple[PartState, str, str, bool]


def _reduced(text: str, remedy: str, *, is_logged: bool = False) -> _Row:
    return PartState.REDUCED, text, remedy, is_logged


def _off(text: str, remedy: str, *, is_logged: bool = False) -> _Row:
    return PartState.OFF, text, remedy, is_logged


_CHOSEN = "it was chosen; `kvshare config set sharing.max_mode approx` ends it"
_SLOW_SEARCH = "give it more CPU, or look at the Qdrant server; it is tried again every half minute"
_SLOW_EMBEDDER = "give it more CPU, or set index.dense to false; it is tried again every half minute"
_NO_SPACE = "free space, or correct the permissions at store.path; it is tried again every minute"


class PartProblem(_ProblemRow, Enum):
    """The name of the part, and what is wrong with it."""

    SHARING_EXACT_ONLY = _reduced("equal beginnings only are shared", _CHOSEN)
    SHARING_SWITCHED_OFF = _off("nothing is shared", _CHOSEN)
    MODEL_FORMS_MODEL = _reduced(
        "the forms model is served, as the default model could not be fetched",
        "run `kvshare fetch-model` with a connection to the package index, then restart",
    )
    MODEL_CAUTIOUS = _reduced(
        "this model has no calibration, so that less is shared",
        "run `kvshare calibrate --model PATH`, and name its file in sharing.calibration",
    )
    MODEL_IN_PLACE = _reduced(
        "only text at the same position is shared",
        "nothing is broken; docs/models.md lists what is shared of which model",
    )
    MODEL_UNSHARED = _off(
        "nothing is shared", "it is served unshared; docs/models.md lists what is shared of which model"
    )
    REPLICA_SILENT = _off(
        "it does not answer and gets no requests",
        "start that vLLM, or remove it from vllm.replicas; it is asked again and again",
    )
    REPLICA_REFUSED = _off("it gets no requests", "serve the same model there, or remove the replica")
    REPLICA_NO_CONNECTOR = _reduced(
        "it serves without sharing",
        "start it with `kvshare vllm`, or correct control_url; it is asked again and again",
    )
    REPLICA_UNSHARED = _reduced("it serves without sharing", "docs/vllm.md says what is handled")
    REPLICA_WARNS = _reduced("its connector warns", "docs/vllm.md says what it means")
    INDEX_CLOSED = _off(
        "the index cannot be opened",
        "look at the index's disk, or at the Qdrant server; it is tried again every half minute",
    )
    INDEX_PAUSED = _reduced(
        "the index is paused", "free some space; it goes on by itself, and gets what it missed"
    )
    INDEX_LOST = _reduced(
        "the index is filled again after its files were lost", "nothing: it takes seconds to minutes"
    )
    FINGERPRINT_FAILING = _off("search by fingerprints is left out", _SLOW_SEARCH)
    EMBEDDING_FAILING = _off("search by embedding is left out", _SLOW_SEARCH)
    EMBEDDER_MISSING = _off(
        "there is no search by embedding",
        "install it or correct index.embedder, then restart; or set index.dense to false",
    )
    EMBEDDER_FAILING = _off("prompts are not embedded", _SLOW_EMBEDDER)
    INDEXING_FAILING = _off(
        "the index is not written",
        "look at the index's disk, or at the Qdrant server; it is tried again every half minute",
    )
    INDEX_EMBEDDER_FAILING = _off("stored prompts are not embedded", _SLOW_EMBEDDER)
    BACKLOG_FULL = _reduced(
        "embedding is behind: some stored prompts are found by their tokens only",
        "give it more CPU, or set index.dense to false",
        is_logged=True,
    )
    STORE_IN_MEMORY = _reduced(
        "metadata of prompts are in memory, and lost with the process",
        "free space, or correct the permissions at store.path; it is tried again every few seconds",
    )
    STORE_NOT_WRITTEN = _off(
        "no prompt is stored",
        "free space, or correct the permissions at store.path; it is tried with each prompt",
    )
    DISK_NOT_WRITTEN = _off(
        "KV is not written to disk, and is lost with the process",
        "free space, or correct the permissions at store.path; it is tried again every second",
    )
    DISK_REPLICA_NOT_WRITTEN = _off(
        "its KV is not written to disk, and is lost with that vLLM",
        "free space at its --disk, or correct the permissions there; without --disk look at the store of "
        "its --shared-tier. It is tried again every second",
        is_logged=True,
    )
    DISK_REPLICA_GIVEN_UP = _off(
        "its KV is not written to disk any more",
        "start that vLLM again: the files would be of other weights",
        is_logged=True,
    )
    DISK_LATE = _reduced(
        "KV on disk is read too late, so that it is computed",
        "set store.path to a faster disk, or store.disk_bytes to 0",
        is_logged=True,
    )
    CONTROL_REDUCED = _reduced(
        "less is shared, as it made requests slower",
        "nothing is broken, and it returns when it pays again; docs/operating.md says what makes sharing "
        "slow",
    )
    COSTS_NOT_WRITTEN = _reduced("what was measured is not kept", _NO_SPACE, is_logged=True)
    TENANTS_NOT_WRITTEN = _reduced("the tenants of stored prompts are not kept", _NO_SPACE, is_logged=True)
    USAGE_NOT_WRITTEN = _reduced("usage of keys and tenants is not kept", _NO_SPACE, is_logged=True)
    SETTINGS_WRONG = _reduced(
        "the settings are as before, as they could not be read again",
        "correct the file, then reload: `kvshare config reload`",
    )
    SETTINGS_TO_RESTART = _reduced(
        "the settings in the files are others than those in use",
        "restart when it suits; until then the server goes by what it was started with",
    )
