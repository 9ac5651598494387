"""
Compiles what clients constrain answers with, in processes of its own: a grammar that ends or chokes its
compiler costs one request, not the server.

    pool.py      the server's side: starts the first process, and says whose turn it is to compile
    matcher.py   the server's end of one process: tokens go in, masks come back
    worker.py    the processes: the first one reads the tokenizer, and forks one for each grammar
    limits.py    what one grammar may cost
    held_memory.py  what the grammars of a key may cost together
    frames.py    what they send each other
    compilers.py llguidance and xgrammar, which only this package imports

Each grammar has a process of its own, so a mask that crashes one ends only the answer that it was for.
"""
