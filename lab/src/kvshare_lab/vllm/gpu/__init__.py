"""
`kvshare bench gpu`: what only this machine's hardware can show, in one report and a limited time.

    config.py       the options, and the servers that they describe
    runner.py       starts the servers, once for all parts, and measures the parts in their order
    report.py       what was measured and what was not, and how much time is left
    answers.py      self_test: what the connector found on the running model; if it fails, nothing is shared
                    parity: planned requests compared with stock vLLM, beside the effect of batching alone
                    soak: mixed traffic with aborts, evictions and failed loads
    ttft.py         ttft: time to the first token by length, and from where on sharing pays
    load.py         load: many clients, of which all, some or none send near-duplicates
    inter_token.py  inter_token: how loads and saves delay the tokens of running streams
                    syncs: host waits per step, of servers that are started again with vLLM's check
    pieces.py       copies of pieces of registered host memory, by the driver and by our kernel
    profile.py      profile: where the threads of vLLM's engine processes spend their time

A part that does not fit into the time is left out. What was not measured is null, and `not_measured` has the
reason: where a backend does not start or a part fails, the others are still measured. Once for all backends
there is the bandwidth of copies to and from the device.
"""

from kvshare_lab.vllm.gpu.config import Config
from kvshare_lab.vllm.gpu.runner import run

__all__ = ["Config", "run"]
