"""
`kvshare bench demo`: are the answers right? The demo model on held-out near-duplicate pairs.

Every question turns on a value that differs between donor and recipient, so reuse that keeps the donor's
value shows as a wrong answer. Arms, greedy decoding, exact match:
    full               everything computed
    kvshare            the engine as configured: copies, placeholders, repair
    placeholders_only  copies and placeholders, no repair but the last token
    full_reuse         the donor's KV also where the tokens differ; only the question is computed
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from delta_tree import Copy, Op, Span, TokenIds, align, common_suffix_length, gaps
from kvshare.bench.harness import ask, running_engine
from kvshare.bench.parity import SEGMENT, compute, copied
from kvshare.conversation.chat import Chat
from kvshare.demo.pairs import Pair, near_duplicate_pairs
from kvshare.engines.embedded.engine import EmbeddedEngine
from kvshare.engines.embedded.text import Detokenizer
from kvshare.kv.attention import PartialPass
from kvshare.kv.sequence import SequenceKV
from kvshare.requests import Prompt, SharingMode, SharingReport

_MAX_TOKENS = 12
_HELD_OUT_SEED = 20_000


async def run(*, pairs: int = 150, seed: int = _HELD_OUT_SEED) -> dict[str, Any]:
    """Accuracy of every arm over the same pairs, by kind of question, with what sharing saved."""
    answers: list[tuple[Pair, dict[str, str]]] = []
    reports: list[SharingReport] = []
    async with running_engine(None, {"index.dense": False}) as engine:
        configured = engine.sharing.limits
        bare = configured.repair.model_copy(update={"edit_window": 0, "relocated_head": 0, "tail": 1})
        for number, pair in enumerate(near_duplicate_pairs(seed, pairs)):
            tenant = f"pair-{number}"  # a namespace of its own: the donor is this one and no other
            donor = await engine.encode_chat(Chat(tuple(pair.donor_messages)))
            recipient = await engine.encode_chat(Chat(tuple(pair.recipient_messages)))
            asked = partial(ask, engine, tenant=tenant, max_tokens=_MAX_TOKENS)
            await asked(donor.token_ids, mode=SharingMode.OFF, store=True)
            full = await asked(recipient.token_ids, mode=SharingMode.OFF)
            engine.sharing.limits = configured
            shared = await asked(recipient.token_ids, mode=SharingMode.APPROX)
            engine.sharing.limits = replace(configured, repair=bare)
            bare_answer = await asked(recipient.token_ids, mode=SharingMode.APPROX)
            found = {
                "full": full.text.strip(),
                "kvshare": shared.text.strip(),
                "placeholders_only": bare_answer.text.strip(),
                "full_reuse": await asyncio.to_thread(_full_reuse, engine, donor, recipient),
            }
            answers.append((pair, found))
            reports.append(shared.report)
    stale = fmean(found["full_reuse"] == pair.stale_answer for pair, found in answers)
    return {
        **_accuracy(answers),
        "full_reuse_gave_the_donors_answer": stale,
        "kvshare_computed_fraction": fmean(1 - r.num_cached / r.num_prompt_tokens for r in reports),
        "kvshare_exact_fraction": fmean(r.num_exact / r.num_prompt_tokens for r in reports),
        "decisions": {
            decision: sum(r.decision == decision for r in reports) for decision in ("approx", "exact", "full")
        },
        "mean_prompt_tokens": fmean(r.num_prompt_tokens for r in reports),
    }


def _accuracy(answers: list[tuple[Pair, dict[str, str]]]) -> dict[str, Any]:
    """Of every arm, in all and by kind of question."""
    arms, kinds = list(answers[0][1]), dict.fromkeys(pair.kind for pair, _ in answers)

    def right(arm: str, kind: str | None = None) -> float:
        return fmean(found[arm] == pair.answer for pair, found in answers if kind in (None, pair.kind))

    accuracy = {arm: right(arm) for arm in arms}
    return {
        "accuracy": accuracy,
        "by_kind": {arm: {kind: right(arm, kind) for kind in kinds} for arm in arms},
        "points_below_full": {
            arm: 100 * (accuracy["full"] - value) for arm, value in accuracy.items() if arm != "full"
        },
    }


def _full_reuse(engine: EmbeddedEngine, donor: Prompt, recipient: Prompt) -> str:
    """The donor's KV laid under the recipient, replaced values and all; the question alone is computed."""
    model = engine.server.shared_model
    source = model.new_sequence(donor.num_tokens)
    whole = Span(0, donor.num_tokens)
    compute(model, source, (whole,), donor.token_ids)
    target = model.new_sequence(recipient.num_tokens + _MAX_TOKENS)
    copies = _copies(donor.token_ids, recipient.token_ids)
    target.lay_out(copies, {SEGMENT: source.cut(whole)})
    computed = gaps([copy.target for copy in copies], recipient.num_tokens)
    logits = compute(model, target, computed, recipient.token_ids)
    return _decode(engine, target, recipient.num_tokens, int(logits[-1].argmax()))


def _question_start(donor: TokenIds, recipient: TokenIds) -> int:
    """The tail that both close with (the template's) and the recipient's question before it."""
    closing = common_suffix_length(donor, recipient)
    last_edit = [edit for edit in align(donor, recipient, min_run=16).edits if edit.op is not Op.KEEP][-1]
    return min(last_edit.target.start, len(recipient) - closing)


def _copies(donor: TokenIds, recipient: TokenIds) -> list[Copy]:
    """Before the question keeps and replacements alike are taken from the donor."""
    question = _question_start(donor, recipient)
    return [
        copied(edit.source.start, length, target_start=edit.target.start)
        for edit in align(donor, recipient, min_run=1).edits
        if (length := min(len(edit.source), len(edit.target), question - edit.target.start)) > 0
    ]


def _decode(engine: EmbeddedEngine, kv: SequenceKV, position: int, token_id: int) -> str:
    text = ""
    detokenizer = Detokenizer(engine.server.encoder.backend)
    for _ in range(_MAX_TOKENS):
        if token_id in engine.server.eos_token_ids:
            break
        text += detokenizer.add(token_id)
        current = PartialPass(kv, (Span(position, position + 1),))
        token_id = int(
            engine.server.shared_model.compute(current, np.asarray([token_id], dtype=np.int32)).argmax()
        )
        position += 1
    return text.strip()
