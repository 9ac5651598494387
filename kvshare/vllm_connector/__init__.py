"""
KVShare inside a stock `vllm serve`: the only package that imports vllm.

    scheduler process: scheduler/              every worker process (tensor parallel rank): worker/
    scheduler.py       plan -> load requests   worker.py           carries them out
    request_state.py   one request             segment_store.py    the KV bytes of this rank
    segment_index.py   what the workers hold   paged_cache.py      reads and writes vLLM's blocks
    event_log.py       what happened           model.py            how keys rotate, which weights these are
    control_server.py  the proxy reads it      partial_forward.py  partial attention
    lifecycle.py       from start to shutdown  self_test.py        tries all of it at start

vLLM calls `connector.py` in both. `metadata.py` has what the two sides send each other. `plugin.py` registers
the connector by name, and `workers.py` hands it the model.
"""
