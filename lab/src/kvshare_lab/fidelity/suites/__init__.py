"""
The suites: what is edited, moved or recomposed in each.

A suite is a function that makes the number-th draft, from one source document of a half. The same number and
the same state of `draw` give the same draft.

    forms.py, chats.py, documents.py, systems.py, logs.py,
    examples.py, mosaics.py, records.py, programs.py, languages.py, own_forms.py   the suites
    library.py   the source documents of a half
    slots.py     texts with slots, and values for these
"""

from collections.abc import Callable, Mapping
from random import Random

from kvshare_lab.fidelity.scenario import Draft
from kvshare_lab.fidelity.suites import (
    chats,
    documents,
    examples,
    forms,
    languages,
    logs,
    mosaics,
    own_forms,
    programs,
    records,
    systems,
)
from kvshare_lab.fidelity.suites.library import Library

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
        examples.fewshot,
        mosaics.mosaic,
        records.table,
        programs.code,
        languages.language,
        own_forms.sheet,
        chats.chain,
        logs.log,
    )
}
