"""
Heads that draft, trained in minutes on a model's own answers: what acceptance is measured with.

`answers.py` has the model answer, `networks.py` has the heads, `training.py` trains them, `checkpoints.py`
writes them for vLLM. `lab/scripts/train_head.py` does all of it.
"""
