"""
Benchmarks of the vLLM engine through real HTTP servers: stock vLLM, vLLM with the connector, the proxy.

    servers.py   the processes: start, wait, stop
    stack.py     all of them together, as most benchmarks want them
    client.py    one streamed request and its times
    reports.py   what the proxy tells its operator
    prompts.py   near-duplicates and strangers
    sequences.py many requests, in a closed or an open loop

`gpu.py` is a report of several parts, of which `copies.py`, `break_even.py`, `decoding.py` and `syncs.py` are
nobody else's.
"""
