"""
KVShare inside a stock `vllm serve`: the only package that imports vllm.

    scheduler process: scheduler/                 every worker process (tensor parallel rank): worker/
    scheduler.py       turns plans into requests  worker.py           what vLLM calls in each step
    request_state.py   the state of one request   start.py            memory and self-test, at the start
    retention.py       what is retained of it     transfers.py        copies, saves and drops
    saving.py          decides on that            placeholders.py     computes what no copy covers
    drops.py           drops segments             reports.py          what a step reports
    segment_index.py   what the workers hold      copy_writer.py      writes stored rows into vLLM's blocks
    event_log.py       what happened              partial_forward.py  partial attention
    control_server.py  the proxy reads events     segment_store.py    stored rows in host memory
    lifecycle.py       start and shutdown         paged_cache.py      reads and writes vLLM's blocks
    shared_news.py     what other vLLMs write     disk_store.py       files and a shared store below

vLLM calls `connector.py` in both: it opens with a table of the calls. `metadata.py` has what the two sides
send each other. `plugin.py` registers the connector by name, `config.py` reads its settings, `workers.py`
gives it the model, `speculation.py` says what its drafts are made from, and `beside.py` puts it next to
another connector.
"""
