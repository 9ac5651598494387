"""
An operator's questions to the store, answered as JSON-ready documents.

Functions over a `DeltaTree`, asked by the server's admin routes and by `kvshare tree` and its like on the
store of a stopped server. Documents have spans and counts, no token ids. Segment ids are written as 16 hex
digits: they do not fit a JSON number.
"""

from kvshare.admin import questions
from kvshare.admin.question import QUESTIONS, Answer, Question

__all__ = ["QUESTIONS", "Answer", "Question", "questions"]
