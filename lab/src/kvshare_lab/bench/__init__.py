"""
Benchmarks of the embedded engine and of single parts, behind `kvshare bench NAME --json`.

A command is a module with `run(**options) -> dict`; what is returned was measured, and kvshare_lab/cli puts
name and options before it. Arms are measured side by side in one process, alternating, and reported as ratios
of medians.

    parity.py, ttft.py, restart.py, burst.py, grammar.py     the embedded engine
    plan.py, index.py, replay.py                 the sharing core, without a model
    proxy.py, connections.py                     the HTTP front and the relay
    flood.py                                     two tenants of one server
    throttled.py, disk_starts.py                 for `restart`: a disk too slow to pay, many objects
    pairs.py, agents.py, papers.py               answers, and what is reused
    harness.py          a running engine or server, timed requests, arms that take turns
    figures.py          percentiles, intervals, memory, sizes of files
    bound.py            the least time that a shared prefill can take
    direct.py           the model without the engine
    random_models.py    models with random weights; random_configurations.py: their configurations
    large_models.py     those that no host can build in memory
    block_cache.py      what policies of eviction leave of a log; oracle_cache.py: the most that any could
    offloaded_blocks.py what vLLM's own offloading would reuse of it
    counted_store.py    a store whose KV is only counted
    text_like.py, pair_texts.py   prompts
    upstream.py         a model server without a model
"""
