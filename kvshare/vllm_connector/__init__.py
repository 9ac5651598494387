"""
KVShare inside a stock `vllm serve`: the only package that imports vllm.

    scheduler process                                     every worker (tensor parallel rank)
    connector.py -> tickets.py  plan -> load orders ----> connector.py -> worker.py
                    ledger.py   what is held              store.py    the KV bytes of this rank
                    journal.py  what happened             paged.py    laying and reading vLLM's blocks
                    control.py  the proxy reads it        passes.py   partial attention
                    refusals.py what is not supported     proofs.py   all of it tried out at start

`plugin.py` registers the connector by name, `workers.py` hands it the model.
"""
