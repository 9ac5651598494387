"""
Rewrites what agent harnesses change at the top of each prompt, before it is tokenized, as configured.

    pattern.py   which regular expressions a rule may have: they must not take long on any text
    rewrite.py   where the texts of a request's JSON body are, for each API, and what rules do to them
"""
