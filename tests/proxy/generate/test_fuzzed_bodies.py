"""Bodies and bytes drawn at random never break the server."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.proxy.conftest import Server, chat
from tests.proxy.generate.refusals import CHAT, TEXT

TEXTS = st.text(max_size=8) | st.sampled_from(["echo", "user", "text", "off", "\0", "\ud800", "1e999"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        *("model", "messages", "prompt", "max_tokens", "n", "stop", "stream", "stream_options", "logprobs"),
        *("logit_bias", "temperature", "seed", "kvshare", "tools", "response_format", "best_of", "echo"),
        *("top_logprobs", "tool_choice", "functions", "function_call", "guided_json", "structured_outputs"),
        *("top_k", "stop_token_ids", "chat_template_kwargs", "reasoning_effort", "continue_final_message"),
        *("input", "dimensions", "encoding_format", "tokens", "return_token_strs"),
    ]
)
BODIES = st.builds(
    lambda base, extra: base | extra,
    st.sampled_from([{}, chat(), {"model": "echo", "prompt": "a", "input": "a", "tokens": [97]}]),
    st.dictionaries(NAMES | TEXTS, VALUES, max_size=4),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=BODIES, path=st.sampled_from([CHAT, TEXT, "/v1/embeddings", "/tokenize", "/detokenize"]))
async def test_fuzzed_bodies_never_break_the_server(server: Server, body: object, path: str) -> None:
    """Any JSON object is answered or refused with an error object; never a 5xx."""
    response = await server.post(path, json.dumps(body).encode())
    text = await response.text()
    assert response.status in (200, 400, 404), text
    if response.status != 200:
        assert json.loads(text)["error"].keys() == {"message", "type", "param", "code"}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=64))
async def test_fuzzed_bytes_never_break_the_server(server: Server, body: bytes) -> None:
    """Bytes that are no JSON object are a 400."""
    response = await server.post(CHAT, body)
    assert response.status == 400
