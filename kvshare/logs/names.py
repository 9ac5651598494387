"""
The names that logs have for the same thing. Of several fields of a row, the first that is not null
(for names: and not empty) counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ROLES: Mapping[str, Sequence[str]] = {  # of messages
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "function_call"),
    "system": ("system", "developer"),
    "tool": ("tool", "function", "observation"),
}
CONVERSATION = ("conversation", "conversation_id", "session_id", "sessionId")
USER = ("end_user", "user", "safety_identifier", "user_id", "userId", "request_user_id")
TIME = ("timestamp", "created", "created_at", "startTime", "start_time", "request_created_at")
BODIES = ("body", "request", "request_body", "proxy_server_request")
"""Of a request, next to what the log says of it."""
ANSWERS = ("response", "response_body", "output")
"""Next to a body."""
LANGUAGE = ("language", "lang")
NAMESPACE = ("namespace", "tenant")
LENGTHS = (
    *("output_tokens_count", "output_tokens", "output_length", "completion_tokens"),
    *("prompt_tokens_count", "prompt_tokens", "prompt_length", "prompt_len"),
)
"""Of answers and prompts, in the tokens of a load tool."""
AS_JSON = ("messages", "conversations", "conversation", *BODIES, "metadata", "requests", "input")
"""Exporters and SQL write these as text; none of them is text otherwise."""
