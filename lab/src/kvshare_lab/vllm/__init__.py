"""
Benchmarks of the vLLM engine through real HTTP servers: stock vLLM, vLLM with the connector, the proxy.

    servers.py          the processes: start, wait, stop
    watchdog.py         ends them when the benchmark has ended; cpu_time.py: what they have computed
    ports.py            which of them listens where
    termination.py      SIGTERM, which must end them, too
    stack.py            all of them together, the options that benchmarks share, the head of their documents
    session.py          a benchmark at work: clients, prompts, the connector's events
    client.py           one streamed request and its times; metrics
    prompts.py          near-duplicates and unrelated prompts; illustrated.py: as chats with images
    tickets.py          requests that no proxy plans
    sequences.py        many requests, in a closed or an open loop
    bounds.py           when sharing is in the way of requests
    slow_disk.py        a proxy whose disk is slow
    failing_worker.py   the worker class with which loads fail during a soak
    block_keeper.py     a connector of another kind, next to KVShare's; soak_command.py: a vLLM with both
    kinds.py            tiny models of the kinds that vLLM serves
    drawn_weights.py    some of them have weights that vLLM draws
    int8_weights.py     one of them with weights of 8 bits; processors.py: one that reads images
    absent_torchvision.py  a name for torchvision, with which models that take media can be served
    heads.py            heads that draft for some of them; mtp.py: those of the MTP kind
    form_pairs.py       near-duplicates for a chat model

Each of the others is a command, with its `Config`, `measure(session)`, and `run(config)`, which starts the
servers: parity.py, ttft.py, load.py, steady.py, interference.py, inway.py, way.py, soak.py, burst.py,
restart.py, acceptance.py, and gpu/, which reports several parts.
"""
