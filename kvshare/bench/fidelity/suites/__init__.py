"""
The suites: what is edited, moved or recomposed in each. One function makes the number-th draft of a suite
from the documents of one half; the same number is the same draft in every run.
"""

from collections.abc import Callable, Mapping
from random import Random

from kvshare.bench.fidelity.scenario import Draft
from kvshare.bench.fidelity.suites import chats, documents, forms, logs, systems
from kvshare.bench.fidelity.suites.library import Library

Suite = Callable[[Library, int, Random], Draft | None]

SUITES: Mapping[str, Suite] = {
    suite.__name__: suite
    for suite in (
        forms.template,
        chats.resubmit,
        chats.window,
        documents.rag,
        documents.reorder,
        documents.agent,
        systems.header,
        chats.thinking,
        forms.derived,
        forms.negation,
        forms.needle,
        systems.toolcall,
        systems.judge,
        chats.chain,
        logs.log,
    )
}
