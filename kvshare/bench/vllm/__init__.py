"""
Benchmarks of the vLLM engine through real HTTP servers: stock vLLM, vLLM with the connector, the proxy.

    servers.py   the processes: start, wait, stop
    stack.py     all of them together, and the options that benchmarks have in common
    session.py   a benchmark at work: clients, prompts, the connector's reports
    client.py    one streamed request and its times
    reports.py   what the proxy and the connector report
    prompts.py   near-duplicates and unrelated prompts
    sequences.py many requests, in a closed or an open loop

`gpu.py` is a report of several parts; `break_even.py`, `decoding.py` and `syncs.py` serve only it.
"""
