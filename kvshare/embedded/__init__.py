"""
The embedded engine: torch and transformers in the proxy's own process, on CPU or one GPU.

    engine.py          EmbeddedEngine: admits requests, plans, starts tasks, stores the computed KV
    admission.py       which requests run, and which wait
    server.py          what is open between start and stop, and its threads
    start_measurement.py  what prefills and loads cost, before the first request
    stored_kv.py       the tree and the tiers of KV, with what an earlier process has left
    shared_prompts.py  tells other servers of prompts, and stores theirs
    exchange_state.py  the names of these prompts in the shared store, and why they are not exchanged now
    task.py            a request while it is computed
    scheduler.py       advances all tasks in turn, one chunk of prefill or one token at a time
    turns.py           which task is next: equal shares for tenants
    chunks.py          how many tokens of a prefill are computed before others have their turn
    prefill.py         a prompt, pass by pass; repairs are chosen on the way
    ahead_prefill.py   the beginning of a prompt, while the KV of what comes after it is read from disk
    retention.py       stores prompt and answer of one request
    shadows.py         computes some answers once more in full, to measure how far they deviate (recording.py)
    choice.py          one completion: text, stop strings, log-probabilities (held_logprobs.py)
    sampling.py        logits -> the next token
    grammar.py         the tokens that a grammar permits
    tokenizer.py       the chat template, and tokens

    decoder.py         the interface of a model, and its checks
    model.py           a model whose KV is shared, with partial attention (registered_attention.py)
    unshared.py        a model that is served without sharing
    embeddings.py      texts of clients as vectors
    loading.py         which of the two a network becomes
    stored_model.py    what the files of a model say, without loading it

Its sister is `kvshare.fleet`: both run on `kvshare.runtime`, and neither knows the other.
"""
