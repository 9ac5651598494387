"""
Replay: what sharing would save on real traffic, from a log file, without a GPU and without a model.

    options.py    what is replayed, and how
    stream.py     several files -> one stream in time order, every turn after the turns it builds on
    tokens.py     requests -> `TokenizedRequest`s; requests.py: these, and what a policy reused
    policies/     what each cache policy would have reused of every request, on the same stream
    rows.py       outcomes -> rows of numbers, on disk; measures.py: rows -> figures
    results.py    the schema of `results.json`
    run.py        runs all of this, resumes, and writes what report/ draws; whole_files.py: how it writes
    tiers.py      memory above a disk: what is reused from where, under policies of eviction
    paper.py      the source paper's figures 2 and 4; live.py: the same stream sent to a running server
    diff.py       two runs compared, request by request
    workloads/    streams for which sharing pays, made from real text with a seed
"""
