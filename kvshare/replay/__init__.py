"""
Replay: what sharing would save on real traffic, from a log file, without a GPU and without a model.

    readers/      one file per published format -> `LoggedRequest`s; what cannot be read is counted by line
    stream.py     several files -> one stream in time order, every turn after the turns it builds on;
                  on disk: spill.py keeps the rows, sorting.py puts them in order
    tokens.py     requests -> `TokenizedRequest`s
    arms/         what each way of caching would have reused of every request, on the same stream
    measures.py   outcomes -> figures; run.py drives it all, resumes, and writes what report/ draws
    paper.py      the source paper's figures 2 and 4; live.py the same stream against a running server
    diff.py       two runs compared, request by request
    workloads/    streams where it pays, made from real text with a seed
"""
