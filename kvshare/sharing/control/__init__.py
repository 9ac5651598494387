"""
Watches whether sharing pays on the whole server, and shares less at loads where it does not.

    controller.py   `Controller`, which both engines ask: draws blocks, takes requests in, reports
    treatment.py    how one request is served
    blocks.py       blocks of time, the unit of the experiment
    load_level.py   one load: its rung, and when that changes
    rungs.py        how much is shared on each rung
    contest.py      compares more sharing with less; sequential.py: the test of one measure
    acceptance.py   compares how often drafts are accepted, if the engine decodes speculatively
    repeats.py      which prompts are likely to be copied
"""

from kvshare.sharing.control.controller import Controller
from kvshare.sharing.control.rungs import Rung
from kvshare.sharing.control.treatment import Treatment

__all__ = ["Controller", "Rung", "Treatment"]
