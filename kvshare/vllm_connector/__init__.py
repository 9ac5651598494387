"""
KVShare inside a stock `vllm serve`: the only package that imports vllm.

    scheduler process: scheduler/                 every worker process (tensor parallel rank): worker/
    scheduler.py       turns plans into requests  worker.py           carries them out
    request_state.py   the state of one request   copy_writer.py      writes stored rows into vLLM's blocks
    segment_index.py   what the workers hold      partial_forward.py  partial attention
    event_log.py       what happened              segment_store.py    stored rows in host memory
    control_server.py  the proxy reads events     paged_cache.py      reads and writes vLLM's blocks
    lifecycle.py       start and shutdown         self_test.py        checks all of it at start

vLLM calls `connector.py` in both. `metadata.py` has what the two sides send each other. `plugin.py` registers
the connector by name, and `workers.py` gives it the model.
"""
