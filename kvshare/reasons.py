"""
Why less was shared than might have been: the fixed words that reports, headers, metrics and the log give, and
the sentences that explain them to users.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum, auto
from functools import cache
from pathlib import Path

from kvshare.tables import read_table


class Reason(StrEnum):
    """One word for each cause; reasons.yaml explains it."""

    # Nothing was looked up.
    OFF = auto()
    MODEL_UNSHARED = auto()
    SHORT_PROMPT = auto()
    EXPERIMENT = auto()
    REDUCED = auto()
    # Nothing was found, or nothing good enough.
    NO_CANDIDATES = auto()
    NOTHING_IN_COMMON = auto()
    NOT_ENOUGH_SAVED = auto()
    DOES_NOT_PAY = auto()
    DEVIATES_TOO_MUCH = auto()
    ROTATION_UNKNOWN = auto()
    TOO_MUCH_RELOCATED = auto()  # only in a replay: no server has this limit
    KV_GONE = auto()
    KV_LATE = auto()
    LOOKUP_FAILED = auto()
    # Only in front of vLLM.
    NO_CONNECTOR = auto()
    SPECULATION = auto()
    REPLICA_GONE = auto()
    # The relay does not plan these requests.
    MALFORMED = auto()
    NOT_TOKENIZED = auto()
    ADAPTER = auto()
    SEVERAL_PROMPTS = auto()
    PROMPT_EMBEDS = auto()
    SUFFIX = auto()
    PROMPT_LOGPROBS = auto()
    TRUNCATED = auto()
    NO_RENDER = auto()
    PREVIOUS_RESPONSE = auto()
    BACKGROUND = auto()
    BEAM_SEARCH = auto()
    MULTIMODAL = auto()
    # A replica reports these after its plan.
    LORA = auto()
    POOLING = auto()
    NOT_TOKENS = auto()
    PROMPT_MISMATCH = auto()
    NOT_PRIVATE = auto()
    LOAD_FAILED = auto()
    SEGMENTS_GONE = auto()
    NO_ROOM = auto()
    SAVE_FAILED = auto()
    ABORTED = auto()
    UNKNOWN = auto()  # a connector of another version gave a word that this version does not have

    @classmethod
    def of(cls, word: str) -> Reason:
        """The reason that a connector reports; UNKNOWN for a word of another version."""
        return next((reason for reason in cls if reason == word), cls.UNKNOWN)


@cache
def explanations() -> Mapping[Reason, str]:
    """Return what each reason means for users, and what to do."""
    texts = read_table(Path(__file__).with_name("reasons.yaml"))
    return {Reason(word): text for word, text in texts.items()}


def cache_miss_reason(reason: str | None) -> dict[str, str] | None:
    """A reason and its explanation, in the shape that providers use. None: nothing was refused."""
    return None if reason is None else {"type": reason, "message": explanations()[Reason.of(reason)]}
