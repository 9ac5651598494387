"""
The door to the text generator of the demo model: sheets, questions about them, and pairs.

Pure standard library; every function is a pure function of its arguments and the generator or
seed it is given. The parts live in templates, sheets, questions and pairs.
"""

from kvshare.demo.pairs import Pair, near_duplicate_pairs
from kvshare.demo.questions import Kind, Query, Question, answer_to, ask
from kvshare.demo.sheets import Sheet, Slot, changed_slots, edit_sheet, make_sheet, to_messages

__all__ = [
    "Kind",
    "Pair",
    "Query",
    "Question",
    "Sheet",
    "Slot",
    "answer_to",
    "ask",
    "changed_slots",
    "edit_sheet",
    "make_sheet",
    "near_duplicate_pairs",
    "to_messages",
]
