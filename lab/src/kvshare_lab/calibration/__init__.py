"""
`kvshare calibrate`: measures how far a model's answers deviate by the shape of their plans, and fits that.

    run.py         the command: measures, fits and writes the file
    arms.py        the measured arms of plans, with the shapes of these plans made again
    fitting.py     the parameters of `kvshare.sharing.prediction`, fitted to arms
    evaluation.py  how well a fit predicts plans that it has not seen
"""
