"""
A device that is simulated: `kvshare bench device`, and `kvshare bench inway --engine simulated`.

    profile.py, profiles/     what a device costs, and what was measured on it
    clock.py, threads.py      virtual time, actors that share it, and a module's threads as actors
    gpu.py                    a device of which only sizes and durations exist
    streams.py, worker.py     what copies ask of it; the connector's own worker on it
    forward.py                its partial passes
    engine.py                 vLLM's engine core, with its own scheduler
    vllm_config.py            of the model without weights
    lookups.py                the proxy's lookups: the product's sharing core, which is given the donors
    servers.py                stock vLLM
    sharing_server.py         vLLM with the connector, behind the proxy; ranks.py: on several GPUs
    admission.py, start.py    the proxy's controller, and what it measures at start
    routing.py                the ticket that it sends
    disk.py, disk_part.py     a disk below the memory, and the part of `bench device` that reads from it
    prefilling.py             the requests whose first token it waits for
    arms.py                   both servers
    traffic.py                what clients send
    simulation.py             the options of `bench device`; parts.py: its parts
    verdicts.py               its document beside what was measured
    inway.py                  the options of `bench inway`; in_way_parts.py: its parts
    two_arms.py, priors.py    requests with and without sharing; the first ones, where priors are wrong
    machines.py               machines that are derived from the profile
"""

import os

# vLLM logs to stdout, where the document goes; it reads this when it is imported.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
