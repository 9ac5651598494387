"""
The tables and figures of published papers on KV reuse, measured again with any model.

    tables.py    one function for each paper, with its arms
    prompts.py   published data sets, and the prompts made of them
    answers.py   the arms' answers, their cost, and figures over them
"""
