"""
The reasons why less was shared than possible: fixed words for reports, headers, metrics and the log, and
sentences that explain them to users.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Reason(StrEnum):
    """
    One word for each cause, and what it means for users; its last sentence says what to do.

    These sentences are the messages of `cache_miss_reason` and stand in docs/reference.md.
    """

    explanation: str

    def __new__(cls, word: str, explanation: str = "") -> Reason:
        member = str.__new__(cls, word)
        member._value_, member.explanation = word, explanation
        return member

    # Nothing was looked up.
    OFF = (
        "off",
        "Sharing is off for this request: kvshare.mode or the setting sharing.mode is off, or "
        "sharing.max_mode or the max_mode of its tenant permits no other, or the request has the header "
        "Cache-Control: no-cache. Ask for mode exact or approx, or set these.",
    )
    MODEL_UNSHARED = (
        "model_unshared",
        "The KV of this model cannot be shared. `kvshare verify` says why; serve another model to share.",
    )
    SHORT_PROMPT = (
        "short_prompt",
        "The prompt is shorter than sharing.min_prompt_tokens, and a lookup would cost more than it "
        "saves. Lower the setting if such prompts matter.",
    )
    EXPERIMENT = (
        "experiment",
        "The request was served without sharing, to measure whether sharing pays on this server. The "
        "setting control.unshared_share is the share of the time in which requests are served so; 0 turns "
        "that off.",
    )
    REDUCED = (
        "reduced",
        "At this load sharing was measured to make requests slower, so less is shared for now. It returns "
        "when it pays again; `kvshare doctor` shows the figures.",
    )
    # Nothing was found, or nothing good enough.
    NO_CANDIDATES = (
        "no_candidates",
        "No stored prompt of this namespace is similar to this one. A prompt is stored once it is "
        "computed, unless it asks for no_store: the next similar prompt is shared.",
    )
    NOTHING_IN_COMMON = (
        "nothing_in_common",
        "Stored prompts are similar to this one, but none has a stretch of at least sharing.min_run equal "
        "tokens that may be reused. Put the parts that change after the parts that stay the same.",
    )
    EXACT_ONLY = (
        "exact_only",
        "Stored prompts have text in common with this one after the first difference, which only mode "
        "approx reuses. The request asked for mode exact, or the setting sharing.mode, sharing.max_mode or "
        "the max_mode of its tenant permits no more. Ask for mode approx, or set these.",
    )
    NOT_ENOUGH_SAVED = (
        "not_enough_saved",
        "After repair hardly any text after the first difference would have been reused. Put what changes "
        "near the end of the prompt, or pin or move it with a rule.",
    )
    DOES_NOT_PAY = (
        "does_not_pay",
        "Reusing the stored KV would not have been faster than computing, by the measured rates and "
        "cost.min_saved_s. Longer prompts save more.",
    )
    DEVIATES_TOO_MUCH = (
        "deviates_too_much",
        "With the text after the first difference reused, the answer might have been further from that of "
        "a full prefill than sharing.max_deviation, or the request's own limit, allows at the risk of "
        "sharing.max_risk. Put what changes near the end of the prompt, pin or move it with a rule, or "
        "raise a setting.",
    )
    ROTATION_UNKNOWN = (
        "rotation_unknown",
        "The KV of this model cannot be moved to other positions, and equal text stands at another "
        "position. Keep what stays the same at its place, in front of what changes.",
    )
    # only in a replay: no server has this limit
    TOO_MUCH_RELOCATED = (
        "too_much_relocated",
        "More of the copied tokens would have moved far than the replayed policy allows. No server has "
        "this limit; raise that of the policy.",
    )
    KV_GONE = (
        "kv_gone",
        "The KV of the similar prompts was evicted while this one was planned. Raise store.kv_bytes, or "
        "--kv-bytes of `kvshare vllm`.",
    )
    KV_LATE = (
        "kv_late",
        "The KV of the similar prompts is on disk and could not be read in time, so the prompt was "
        "computed. If this is not seldom, the disk is slow or busy: `kvshare tiers` shows it.",
    )
    KV_ELSEWHERE = (
        "kv_elsewhere",
        "The KV of the similar prompts is in the memory of another vLLM, which was busy, and not in the "
        "store that they share yet. If this is not seldom, look whether that store answers: the log of "
        "that vLLM says so.",
    )
    LOOKUP_FAILED = (
        "lookup_failed",
        "The search for similar prompts failed, and the request was served unshared. The server's log "
        "says why.",
    )
    # Only in front of vLLM.
    NO_CONNECTOR = (
        "no_connector",
        "No replica had a connector that shares. `kvshare doctor` says what is wrong with each.",
    )
    SPECULATION = (
        "speculation",
        "vLLM decodes speculatively by a method whose drafts need more than stored KV has, or in a way "
        "that was not tried. `kvshare doctor` says which methods can be shared with.",
    )
    REPLICA_GONE = (
        "replica_gone",
        "The replica that holds the KV of similar prompts did not take the request, and another one "
        "computed it. Check that replica; its name is in the log.",
    )
    # The relay does not plan these requests.
    MALFORMED = (
        "malformed",
        "The body does not follow the API. vLLM's answer says what is wrong with it.",
    )
    NOT_TOKENIZED = (
        "not_tokenized",
        "The prompt could not be tokenized by vLLM. If requests are answered, read the logs of the replicas.",
    )
    ADAPTER = (
        "adapter",
        "The request is for an adapter, or for another model than the replicas' own. Only the base model "
        "is shared.",
    )
    SEVERAL_PROMPTS = (
        "several_prompts",
        "Lists of prompts are not shared in front of vLLM. Send one prompt a request.",
    )
    PROMPT_EMBEDS = (
        "prompt_embeds",
        "Prompts given as embeddings are not shared. Send text or token ids.",
    )
    SUFFIX = (
        "suffix",
        "Prompts with a suffix are not shared. Send text or token ids without one.",
    )
    PROMPT_LOGPROBS = (
        "prompt_logprobs",
        "Log-probabilities of the prompt need all of it computed. Leave out prompt_logprobs, and echo "
        "with logprobs.",
    )
    TRUNCATED = (
        "truncated",
        "Truncated prompts are shared only where vLLM renders them. Start vLLM with --enable-scale-out, "
        "or shorten the prompt instead of truncate_prompt_tokens.",
    )
    NO_RENDER = (
        "no_render",
        "Prompts of /v1/responses and /v1/messages are shared only where vLLM renders them. Start vLLM "
        "with --enable-scale-out.",
    )
    PREVIOUS_RESPONSE = (
        "previous_response",
        "Only vLLM has the prompt of a previous_response_id, and it is not shared. Send the conversation "
        "as input.",
    )
    BACKGROUND = (
        "background",
        "Responses in the background are not shared. Leave out background.",
    )
    BEAM_SEARCH = (
        "beam_search",
        "Beam search is not shared. Leave out use_beam_search.",
    )
    MULTIMODAL = (
        "multimodal",
        "The prompt holds more than text and images that are sent with it (`data:` URLs, base64), or "
        "images of this model are not shared. Send it as text where that is possible.",
    )
    # A replica reports these after its plan.
    LORA = (
        "lora",
        "vLLM ran the request with a LoRA adapter. Only the base model is shared.",
    )
    POOLING = (
        "pooling",
        "The request wanted an embedding or a score, for which no KV is retained.",
    )
    NOT_TOKENS = (
        "not_tokens",
        "vLLM was not given the prompt as token ids. Send text or token ids.",
    )
    PROMPT_MISMATCH = (
        "prompt_mismatch",
        "vLLM made other tokens of the prompt than those that were planned. Give all replicas the same "
        "model, tokenizer and chat template.",
    )
    NOT_PRIVATE = (
        "not_private",
        "vLLM got another cache_salt than the proxy sent. Let nothing between proxy and vLLM change "
        "requests.",
    )
    LOAD_FAILED = (
        "load_failed",
        "The planned KV could not be loaded and was computed. The replica's log says why.",
    )
    SEGMENTS_GONE = (
        "segments_gone",
        "Planned KV had been evicted at the replica. Give its connector more memory.",
    )
    NO_ROOM = (
        "no_room",
        "The replica had no memory left for the new KV, and later requests cannot use it. Give its "
        "connector more.",
    )
    SAVE_FAILED = (
        "save_failed",
        "The new KV could not be saved, and later requests cannot use it. The replica's log says why.",
    )
    ABORTED = (
        "aborted",
        "The request was aborted before its KV was complete, and later requests cannot use it.",
    )
    # a connector of another version gave a word that this version does not have
    UNKNOWN = (
        "unknown",
        "This version of the server has no explanation for that. Run the same version of proxy and "
        "connector.",
    )

    @classmethod
    def of(cls, word: str) -> Reason:
        """Return the reason that a connector reports; UNKNOWN for a word of another version."""
        return next((reason for reason in cls if reason == word), cls.UNKNOWN)


def explanations() -> Mapping[Reason, str]:
    return {reason: reason.explanation for reason in Reason}


def cache_miss_reason(reason: str | None) -> dict[str, str] | None:
    """Return a reason and its explanation, in the shape that providers use. None: nothing was refused."""
    return None if reason is None else {"type": reason, "message": Reason.of(reason).explanation}
