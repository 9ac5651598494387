"""
A device that is simulated: `kvshare bench device`.

    profile.py, profiles/   what a device costs, and what was measured on it
    clock.py, threads.py    virtual time, actors that share it, and a module's threads as actors
    gpu.py                  a device of which only sizes and durations exist
    streams.py, worker.py   what copies ask of it; the connector's own worker on it
    engine.py               vLLM's engine core, with its own scheduler
    vllm_config.py          of the model without weights
    servers.py, ranks.py    stock vLLM, and vLLM with the connector behind the proxy, on one GPU or several
    traffic.py              what clients send
    simulation.py           the benchmark's options; parts.py: its parts
    verdicts.py             its document beside what was measured
"""

import os

# vLLM logs to stdout, where the document goes; it reads this when it is imported.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
