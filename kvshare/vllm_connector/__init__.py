"""
KVShare inside a stock `vllm serve`: the only package that imports vllm.

    scheduler process: scheduler/              every worker process (tensor parallel rank): worker/
    scheduler.py       plan -> load requests   worker.py           carries them out
    request_state.py   one request             paged_cache.py      reads and writes vLLM's blocks
    segment_index.py   what the workers hold   model.py            how keys rotate, which weights these are
    event_log.py       what happened           partial_forward.py  partial attention
    control_server.py  the proxy reads it      self_test.py        tries all of it at start
    lifecycle.py       from start to shutdown

vLLM calls `connector.py` in both. `metadata.py` has what the two sides send each other. `plugin.py` registers
the connector by name, and `workers.py` hands it the model.
"""
