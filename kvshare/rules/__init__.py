"""
Rewrites what agent harnesses change at the top of each prompt, before it is tokenized, as configured.

    texts.py     where the texts of a request's JSON body are, for each API
    rewrite.py   what rules do to them
"""
