"""
`kvshare calibrate`: measures how far a model's answers deviate by the shape of their plans, and fits that.

    run.py         the command: measures, fits and writes the file
    arms.py        the measured arms of plans, with the shapes of these plans made again
    fitting.py     the parameters of `kvshare.sharing.prediction`, fitted to arms
    risks.py       what answers may deviate by, certified on arms
    judging.py     whether the gate keeps its promise on plans that it has not seen
    evaluation.py  how well a fit predicts plans that it has not seen
"""
