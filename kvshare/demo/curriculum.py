"""
What the model is shown, from easy to real: repeated noise, bare slot lines, whole forms.

Many questions stand behind one form as turns of a conversation, so that one reading of the
form teaches many answers. Packing conversations into tensors is done in batches.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from kvshare.demo.questions import KINDS, Kind, ask
from kvshare.demo.sheets import MAX_RECORDS, REMARK, Sheet, make_sheet, to_messages
from kvshare.demo.templates import SYSTEM_MESSAGE
from kvshare.demo.tokenizer import SPECIAL_TOKENS


@dataclass(frozen=True, slots=True)
class Stage:
    """What is shown while training has come this far, and when it has come further."""

    enough: float
    """The share of answer tokens that must be right before the next stage begins."""
    num_tokens: int = 8192
    """About how many tokens a batch holds; many small steps teach the first stages faster."""
    noise: float = 0.0
    """Share of batches that are repeated random tokens."""
    whole_forms: float = 0.0
    """Share of the other batches with complete forms; the rest have only their slot lines."""
    min_records: int = 1
    max_records: int = MAX_RECORDS
    num_questions: int = 20
    kind_weights: tuple[float, float, float] = (0.5, 0.3, 0.2)
    """How often each kind of question is asked, in the order of KINDS."""


STAGES = (
    Stage(enough=0.8, num_tokens=4096, noise=1.0),
    Stage(
        enough=0.8,
        num_tokens=4096,
        noise=0.1,
        max_records=2,
        num_questions=12,
        kind_weights=(1.0, 0.0, 0.0),
    ),
    Stage(enough=0.9, num_tokens=6144, kind_weights=(0.7, 0.1, 0.2)),
    Stage(enough=0.96, whole_forms=0.3),
    Stage(enough=1.0, whole_forms=0.9, num_questions=24, kind_weights=(0.4, 0.4, 0.2)),
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The token ids of a chat, and for each answer its kind and its half-open target span."""

    ids: list[int]
    answers: list[tuple[Kind, int, int]]


def noise(rng: random.Random, *, vocabulary_size: int, length: int) -> list[int]:
    """Random tokens, then the same again: only copying predicts the second half."""
    half = [rng.randrange(len(SPECIAL_TOKENS), vocabulary_size) for _ in range(length // 2)]
    return half + half


def converse(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    stage: Stage,
    *,
    num_records: int,
    whole_form: bool,
) -> Conversation:
    """A form and a chain of different questions about it, each with its answer."""
    sheet = make_sheet(rng, num_records=num_records)
    questions = {}
    for _ in range(stage.num_questions):
        kind = rng.choices(KINDS, stage.kind_weights)[0]
        one = ask(rng, sheet, kind="lookup" if kind == "compare" and num_records < 2 else kind)
        questions[one.query] = one
    asked = list(questions.values())
    messages = to_messages(sheet, asked[0].text)
    if not whole_form:
        messages = _bare_messages(rng, sheet, asked[0].text)
    for index, question in enumerate(asked):
        if index:
            messages.append({"role": "user", "content": question.text})
        messages.append({"role": "assistant", "content": question.answer})
    return mark_answers(tokenizer, messages, [question.kind for question in asked])


def mark_answers(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], kinds: Sequence[Kind]
) -> Conversation:
    """The ids of a chat and where its answers stand, end token included."""
    ids: list[int] = tokenizer.apply_chat_template(messages, return_dict=False)
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    starts = [index + 1 for index, token in enumerate(ids) if token == assistant]
    spans = [(start, ids.index(tokenizer.eos_token_id, start) + 1) for start in starts]
    return Conversation(ids, [(k, *span) for k, span in zip(kinds, spans, strict=True)])


def _bare_messages(rng: random.Random, sheet: Sheet, question: str) -> list[dict[str, str]]:
    """Only the slot lines, shuffled, so that nothing but the label tells records apart."""
    lines = [sheet.line(slot) for slot in sheet.slots if slot.field != REMARK]
    rng.shuffle(lines)
    content = "\n".join(lines) + "\n\n" + question
    return [
        {"role": "system", "content": SYSTEM_MESSAGE},
        {"role": "user", "content": content},
    ]

