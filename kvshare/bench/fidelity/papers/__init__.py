"""
The tables and figures of the papers that KVShare competes with, made anew with a model of one's own.

    data.py      published data sets, as they are written -> questions, pairs of a text and what it becomes
    prompts.py   what is asked, what is stored, in words and tokens
    answers.py   an arm's answer, and what it cost
    scores.py    BLEU, ROUGE-L, F1, Jaccard; means with intervals
    tables.py    one function per paper: data sets x arms
    texts.yaml   wording of prompts and of the report
"""
