"""
The OpenAI-compatible HTTP server of KVShare. It knows requests, keys and streams; it knows no KV.

    openai/    /v1 for the embedded engine: reads bodies, writes answers
    relay/     /v1 in front of vLLM: plans requests, forwards them, passes answers on
    the rest   serves both: the application, keys, errors, metrics, logs, admin routes
"""
