"""
`kvshare bench demo`: are the answers right? The demo model on held-out near-duplicate pairs.

Every question turns on a value that differs between donor and recipient, so an answer from the donor's value
is wrong and is noticed. Arms, greedy decoding, exact match:
    full               everything computed
    kvshare            the engine as configured: copies, placeholders, repair
    placeholders_only  copies and placeholders, no repair but the last token
    full_reuse         the donor's KV also where the tokens differ; only the question is computed
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from delta_tree import Copy, Op, Span, TokenIds, align, common_suffix_length, gaps
from kvshare.conversation.chat import Chat
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.requests import Decision, Prompt, SharingMode
from kvshare_lab.bench.direct import SEGMENT, compute, copied, greedy
from kvshare_lab.bench.harness import Answer, ask, running_engine
from kvshare_lab.demo_model.pairs import Pair, near_duplicate_pairs

_MAX_TOKENS = 12
_HELD_OUT_SEED = 20_000


async def run(*, pairs: int = 150, seed: int = _HELD_OUT_SEED) -> dict[str, Any]:
    """Accuracy of every arm over the same pairs, by kind of question, with what sharing saved."""
    answers, reports = [], []
    async with running_engine(None, {"index.dense": False}) as engine:
        for number, pair in enumerate(near_duplicate_pairs(seed, pairs)):
            shared, found = await _answers(engine, pair, tenant=f"pair-{number}")
            answers.append((pair, found))
            reports.append(shared.report)
    decisions = [report.decision for report in reports]
    stale = fmean(found["full_reuse"] == pair.stale_answer for pair, found in answers)
    return {
        **_accuracy(answers),
        "full_reuse_gave_the_donors_answer": stale,
        "kvshare_computed_fraction": fmean(each.num_missed / each.num_prompt_tokens for each in reports),
        "kvshare_exact_fraction": fmean(each.num_exact / each.num_prompt_tokens for each in reports),
        "decisions": {decision: decisions.count(decision) for decision in Decision},
        "mean_prompt_tokens": fmean(each.num_prompt_tokens for each in reports),
    }


async def _answers(engine: EmbeddedEngine, pair: Pair, tenant: str) -> tuple[Answer, Mapping[str, str]]:
    """KVShare's answer, and the text of every arm's. Each pair has its own `tenant`: no other donors."""
    configured = engine.sharing.limits
    bare = configured.repair.model_copy(update={"edit_window": 0, "relocated_head": 0, "tail": 1})
    donor = await engine.encode_chat(Chat(tuple(pair.donor_messages)))
    recipient = await engine.encode_chat(Chat(tuple(pair.recipient_messages)))
    asked = partial(ask, engine, tenant=tenant, max_tokens=_MAX_TOKENS)
    await asked(donor.token_ids, mode=SharingMode.OFF, store=True)
    full = await asked(recipient.token_ids, mode=SharingMode.OFF)
    shared = await asked(recipient.token_ids, mode=SharingMode.APPROX)
    engine.sharing._limits = replace(configured, repair=bare)
    unrepaired = await asked(recipient.token_ids, mode=SharingMode.APPROX)
    engine.sharing._limits = configured
    return shared, {
        "full": full.text.strip(),
        "kvshare": shared.text.strip(),
        "placeholders_only": unrepaired.text.strip(),
        "full_reuse": await asyncio.to_thread(_full_reuse, engine, donor, recipient),
    }


def _accuracy(answers: list[tuple[Pair, Mapping[str, str]]]) -> dict[str, Any]:
    """Of every arm, in all and by kind of question."""
    arms, kinds = list(answers[0][1]), dict.fromkeys(pair.kind for pair, _ in answers)

    def right(arm: str, *kinds: str) -> float:
        return fmean(found[arm] == pair.answer for pair, found in answers if pair.kind in kinds)

    accuracy = {arm: right(arm, *kinds) for arm in arms}
    return {
        "accuracy": accuracy,
        "by_kind": {arm: {kind: right(arm, kind) for kind in kinds} for arm in arms},
        "points_below_full": {
            arm: 100 * (accuracy["full"] - value) for arm, value in accuracy.items() if arm != "full"
        },
    }


def _full_reuse(engine: EmbeddedEngine, donor: Prompt, recipient: Prompt) -> str:
    """Copy the donor's KV below the recipient, replaced values and all; compute the question alone."""
    model, num_tokens = engine.server.shared_model, recipient.num_tokens
    source, target = model.new_sequence(donor.num_tokens), model.new_sequence(num_tokens + _MAX_TOKENS)
    whole, ends = Span(0, donor.num_tokens), engine.server.eos_token_ids
    compute(model, source, (whole,), donor.token_ids)
    copies = _copies(donor.token_ids, recipient.token_ids)
    target.write_copies(copies, {SEGMENT: source.cut(whole)})
    computed = gaps([copy.target for copy in copies], num_tokens)
    logits = compute(model, target, computed, recipient.token_ids)[-1]
    tokens, _ = greedy(model, target, num_tokens, logits, limit=_MAX_TOKENS, ends=ends)
    text: str = engine.server.encoder.backend.decode(tokens, skip_special_tokens=True)
    return text.strip()


def _copies(donor: TokenIds, recipient: TokenIds) -> list[Copy]:
    """All before the question is taken from the donor, whether its tokens are equal or were replaced."""
    closing = common_suffix_length(donor, recipient)  # the template's tail, equal in both
    last_edit = [edit for edit in align(donor, recipient, min_run=16).edits if edit.op is not Op.KEEP][-1]
    question = min(last_edit.target.start, len(recipient) - closing)
    return [
        copied(edit.source.start, length, target_start=edit.target.start)
        for edit in align(donor, recipient, min_run=1).edits
        if (length := min(len(edit.source), len(edit.target), question - edit.target.start)) > 0
    ]
