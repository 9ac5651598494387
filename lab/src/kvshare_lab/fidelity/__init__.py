"""
`kvshare bench fidelity`: how much reusing KV changes answers, for each repair rule, with any model.

    command.py         what the command measures: stages, or chains
    suites/            what is stored and what is asked, in words
    scenario.py        the same in tokens; halves of the source documents
    stored_prompts.py  stored prompts and their KV       layered.py  a model run layer by layer
    trial.py           one plan, ready for any rule      rules/      which tokens are computed again
    measures.py, arms.py         what is measured of an answer and of a plan
    laboratory.py, rows.py       work that can be stopped and continued
    statistics.py, tables.py, plots.py, report.py        intervals, tests, tables, figures
    chains.py, served.py         edits of edits at different places, served as by a server: `--chains`
    papers/            the tables of published papers: `kvshare bench papers`

Rules get the same donors, plans and rotation; `full`, `set-cache` and `cache-craft` bring their own copies.
"""
