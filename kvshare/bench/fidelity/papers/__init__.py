"""
The tables and figures of published papers on KV reuse, measured again with any model.

    data.py      published data sets -> questions, and pairs of a text and what it becomes
    prompts.py   what is asked and what is stored, in words and tokens
    answers.py   an arm's answer and its cost
    scores.py    BLEU, ROUGE-L, F1, Jaccard; means with intervals
    tables.py    one function for each paper: data sets x arms
    texts.yaml   prompts, arms and notes
"""
