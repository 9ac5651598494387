"""
Plans what a prompt copies from stored prompts, and stores it: for serving, `explain` and replay.

    pipeline.py        Sharing: looks up, plans, fetches. lookup.py: its result
    fetching.py        gets the KV of a plan, from disk only as long as that pays
    splitting.py       what of a plan is read from disk, and what an engine computes meanwhile
    indexing.py        keeps the index in step with what is stored
    arrivals.py        similar prompts that are being computed, for which a request waits

    planner.py         tokens and candidates -> a plan, or the reason why there is none
    approximation.py   the approximate plans of one composition
    acceptance.py      which of them may be used, and which is
    originals.py       how long a plan from exact originals takes at least
    plan.py            the plan as data            explain.py         the plan as a document
    limits.py          what limits a plan          media.py           images are copied as a whole
    placed.py          copies as arrays, where only their places count

    rates.py           the seconds that a plan takes, and those that it saves
    cost.py            learns the rates from measurements, by the least squares of regression.py
    late_reads.py      when a disk is believed to be slow
    kept_costs.py      keeps what was measured in a file
    waits.py           how much longer a prompt waits if its KV is loaded while other prompts run
    worth.py           whether a lookup, an embedding or a plan is worth its time by the rates

    prediction.py      how far the answer is expected to deviate, by the model's calibration.py
    risk.py            how far the answer may deviate
    repair.py          which tokens are repaired by place; repair_choice.py: by what a probe pass measured

    control/           whether sharing pays on the whole server, and what is shared where it does not

    keeper.py          writes nodes and evicts; memory_keeper.py: for KV in this process
    tenant_budget.py   how much KV one tenant has, and may have
    node_draft.py      a computed sequence -> a node of the tree
    budget.py          how much of a memory is used, and may be pinned
"""
