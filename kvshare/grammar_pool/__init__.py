"""
Compiles what clients constrain answers with, in processes of its own: a grammar that ends or chokes its
compiler costs one request, not the server.

    pool.py           the server's side: compiles a grammar in a process of its own
    turns.py          whose grammar is compiled now, and who waits
    first_process.py  reads the tokenizer, and forks a process for each grammar
    matcher.py        the server's end of one process: tokens go in, masks come back
    worker.py         what the processes do
    compilers.py      llguidance and xgrammar, which only this package imports
    vllm_formats.py   tries what vLLM will do with the format of an answer
    frames.py         what the processes send each other
    limits.py         what one grammar may cost
    held_memory.py    what the grammars of a key may cost together

Each grammar has a process of its own, so a mask that crashes one ends only the answer that it was for.
"""
