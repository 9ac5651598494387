"""
The OpenAI-compatible HTTP server of KVShare. It knows requests, keys and streams; it knows no KV.

    generate/  /v1 for the embedded engine: reads bodies, writes answers
    relay/     /v1 in front of vLLM: plans requests, forwards them, passes answers on
    openapi/   all routes, as a document and as a page to read
    the rest   serves both: the application, keys, errors, metrics, logs, admin routes
"""
