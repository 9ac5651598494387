"""
Why less was shared than might have been: each fixed word that a report may give, and what it means for users.

The words are counted in metrics and stand in answers, headers and the log; a sentence says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[str, str] = {
    # Nothing was looked up.
    "off": (
        "Sharing is off for this request: kvshare.mode or the setting sharing.mode is off, or the request "
        "has the header Cache-Control: no-cache. Ask for mode exact or approx."
    ),
    "model_unshared": (
        "The KV of this model cannot be shared. `kvshare verify` says why; serve another model to share."
    ),
    "short_prompt": (
        "The prompt is shorter than sharing.min_prompt_tokens, so that a lookup is not worth its time. "
        "Lower the setting if such prompts matter."
    ),
    # Nothing was found, or nothing good enough.
    "no_candidates": (
        "No stored prompt of this namespace is like this one. Prompts are stored once they are computed, "
        "unless they ask for no_store: a second one like it is shared."
    ),
    "nothing_in_common": (
        "Stored prompts are like this one, but have no stretch of at least sharing.min_run equal tokens "
        "that may be reused in this mode. Put what changes behind what stays the same, or ask for mode "
        "approx."
    ),
    "not_enough_saved": (
        "After repair hardly anything would have been reused of the text behind the first difference. Put "
        "what changes near the end of the prompt, or pin or move it with a rule."
    ),
    "does_not_pay": (
        "Reusing the stored KV would not have been faster than computing, by the measured rates and "
        "cost.min_saved_s. Longer prompts pay."
    ),
    "deviates_too_much": (
        "With the text behind the first difference reused, the answer was expected to be further from that "
        "of a full prefill than sharing.max_deviation allows. Put what changes near the end of the prompt, "
        "pin or move it with a rule, or raise the setting."
    ),
    "rotation_unknown": (
        "The KV of this model cannot be moved to other positions, and equal text stands at another "
        "position. Keep what stays the same at its place, in front of what changes."
    ),
    "kv_gone": (
        "The KV of the prompts like this one was evicted while it was planned. Give it more memory: "
        "store.kv_bytes, or the connector's in vLLM."
    ),
    "lookup_failed": (
        "The search for prompts like this one failed, so that it was served without. The server's log says "
        "why."
    ),
    # Only in front of vLLM.
    "no_connector": (
        "No replica with a connector that shares was there. `kvshare doctor` says what is wrong with each."
    ),
    "replica_gone": (
        "The replica with the KV of prompts like this one did not take the request, and another one "
        "computed it. Look after that replica; its name is in the log."
    ),
    # What the relay does not plan.
    "malformed": "The body is not as the API says. vLLM's answer says what is wrong with it.",
    "not_tokenized": (
        "The prompt could not be tokenized by vLLM. If requests are answered, look into the logs of the "
        "replicas."
    ),
    "adapter": (
        "The request is for an adapter, or for another model than the replicas' own. Only the base model is "
        "shared."
    ),
    "several_prompts": "Lists of prompts are not shared in front of vLLM. Send one prompt a request.",
    "prompt_embeds": "Prompts given as embeddings are not shared. Send text or token ids.",
    "suffix": "Prompts with a suffix are not shared. Send text or token ids without one.",
    "prompt_logprobs": (
        "Log-probabilities of the prompt need all of it computed. Leave out prompt_logprobs, and echo with "
        "logprobs."
    ),
    "truncated": (
        "Truncated prompts are shared only where vLLM renders them. Start vLLM with --enable-scale-out, or "
        "shorten the prompt instead of truncate_prompt_tokens."
    ),
    "no_render": (
        "Prompts of /v1/responses and /v1/messages are shared only where vLLM renders them. Start vLLM with "
        "--enable-scale-out."
    ),
    "previous_response": (
        "Only vLLM has the prompt of a previous_response_id, so that it is not shared. Send the conversation "
        "as input."
    ),
    "background": "Responses in the background are not shared. Leave out background.",
    "beam_search": "Beam search is not shared. Leave out use_beam_search.",
    "multimodal": (
        "Prompts that hold more than text are not shared. Send them as text where that is possible."
    ),
    # Reported by a replica behind its plan.
    "lora": "vLLM ran the request with a LoRA adapter. Only the base model is shared.",
    "pooling": "The request wanted an embedding or a score, for which no KV is kept.",
    "not_tokens": "vLLM was not given the prompt as token ids. Send text or token ids.",
    "prompt_mismatch": (
        "vLLM made other tokens of the prompt than those that were planned. Give all replicas the same "
        "model, tokenizer and chat template."
    ),
    "not_private": (
        "vLLM got another cache_salt than the proxy sent. Let nothing between proxy and vLLM change requests."
    ),
    "load_failed": "The planned KV could not be loaded and was computed. The replica's log says why.",
    "segments_gone": "Planned KV had been evicted at the replica. Give its connector more memory.",
    "no_room": (
        "The new KV found no room at the replica, so that later requests cannot use it. Give it more memory."
    ),
    "save_failed": (
        "The new KV could not be saved, so that later requests cannot use it. The replica's log says why."
    ),
    "aborted": "The request was aborted before its KV was complete, so that later requests cannot use it.",
}

_UNKNOWN = (
    "This version of the server has no explanation for that. The versions of proxy and connector may differ."
)


def cache_miss_reason(reason: str | None) -> dict[str, str] | None:
    """A reason and what it means, in the shape that providers use. None: nothing was refused."""
    return None if reason is None else {"type": reason, "message": REASONS.get(reason, _UNKNOWN)}
