"""
A device that is simulated: `kvshare bench device`.

    profiles      what a device costs, and what was measured on it
    clock         virtual time, and actors that share it
    gpu           a device of which only sizes and durations exist
    worker        the connector's own worker on it
    engine        vLLM's engine core, with its own scheduler
    vllm_config   of the model without weights
    servers       stock vLLM, and vLLM with the connector behind the proxy
    traffic       what clients send
    simulation    the benchmark
    verdicts      its document beside what was measured
"""

import os

# vLLM logs to stdout, where the document goes; it reads this when it is imported.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
