"""
What the model is shown, from easy to real.

Repeated noise teaches copying; slot lines recited in another order teach to find a value by
its label and field; questions about slot lines, then about whole forms, teach the task.

Many questions stand behind one form as turns of a conversation, so that one reading of the
form teaches many answers. Packing conversations into tensors is done in batches.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from transformers import PreTrainedTokenizerFast

from kvshare.demo.questions import KINDS, Kind, ask, queries
from kvshare.demo.sheets import MAX_RECORDS, REMARK, Sheet, make_sheet, to_messages
from kvshare.demo.templates import SYSTEM_MESSAGE
from kvshare.demo.tokenizer import encode_chat


@dataclass(frozen=True, slots=True)
class Stage:
    """What is shown while training has come this far, and when it has come further."""

    enough: float
    """The share of answer tokens that must be right before the next stage begins."""
    num_tokens: int = 8192
    """About how many tokens a batch holds; many small steps teach the first stages faster."""
    noise: float = 0.0
    """Share of batches that are repeated random tokens."""
    recitals: float = 0.0
    """Share of batches that are slot lines said twice, in two orders."""
    whole_forms: float = 0.0
    """Share of the other batches with complete forms; the rest have only slot lines."""
    min_records: int = 1
    max_records: int = MAX_RECORDS
    num_questions: int = 20
    kind_weights: tuple[float, float, float] = (0.5, 0.3, 0.2)
    """How often each kind of question is asked, in the order of KINDS."""


LOOKUPS_ONLY = (1.0, 0.0, 0.0)
STAGES = (
    Stage(enough=0.85, num_tokens=2048, noise=1.0),
    Stage(enough=0.75, num_tokens=4096, noise=0.3, recitals=0.7, max_records=2),
    Stage(
        enough=0.85,
        num_tokens=2048,
        noise=0.05,
        recitals=0.1,
        max_records=1,
        num_questions=16,
        kind_weights=LOOKUPS_ONLY,
    ),
    Stage(
        enough=0.85,
        num_tokens=4096,
        recitals=0.05,
        max_records=3,
        kind_weights=(0.6, 0.15, 0.25),
    ),
    Stage(
        enough=0.93,
        num_tokens=6144,
        whole_forms=0.3,
        min_records=2,
        num_questions=24,
        kind_weights=(0.35, 0.45, 0.2),
    ),
    Stage(
        enough=1.0,
        num_tokens=6144,
        whole_forms=0.6,
        kind_weights=(0.25, 0.45, 0.3),
    ),
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The token ids of a chat, and for each answer its kind and its half-open target span."""

    ids: list[int]
    answers: list[tuple[str, int, int]]

    @property
    def is_noise(self) -> bool:
        """Whether there is nothing to learn but the answers."""
        return self.answers[0][0] == "noise"


@cache
def slot_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The tokens that slot lines are made of."""
    rng = random.Random("slot-tokens")
    sheets = [make_sheet(rng, num_records=MAX_RECORDS) for _ in range(200)]
    lines = {sheet.line(slot) for sheet in sheets for slot in sheet.slots if slot.field != REMARK}
    return tuple(sorted({token for line in lines for token in tokenizer.encode(line)}))


def noise(rng: random.Random, tokenizer: PreTrainedTokenizerFast, *, length: int) -> Conversation:
    """
    Short runs of random tokens, then the same runs in another order.

    Only finding the earlier run and copying on predicts the rest of a run. The order must
    change: at a fixed distance the model would learn the distance and never look.
    """
    tokens = iter(rng.sample(slot_tokens(tokenizer), length // 2))
    runs = []
    left = length // 2
    while left > 0:
        size = min(left, rng.randint(3, 8))
        runs.append([next(tokens) for _ in range(size)])
        left -= size
    ids: list[int] = [token for run in runs for token in run]
    answers: list[tuple[str, int, int]] = []
    for run in rng.sample(runs, len(runs)):
        answers.append(("noise", len(ids) + 1, len(ids) + len(run)))
        ids += run
    return Conversation(ids, [span for span in answers if span[1] < span[2]])


def recite(rng: random.Random, tokenizer: PreTrainedTokenizerFast, *, num_records: int) -> Conversation:
    """The slot lines of a sheet, then again in another order: the second values are learned."""
    sheet = make_sheet(rng, num_records=num_records)
    slots = [slot for slot in sheet.slots if slot.field != REMARK]
    ids: list[int] = [int(tokenizer.bos_token_id)]
    answers: list[tuple[str, int, int]] = []
    for again in (False, True):
        for slot in rng.sample(slots, len(slots)):
            value = f" {sheet.value(slot)}"
            before, _, after = sheet.line(slot).partition(value)
            start = len(ids) + len(prefix := tokenizer.encode(before))
            ids += prefix + tokenizer.encode(value)
            if again:
                answers.append(("recital", start, len(ids)))
            ids += tokenizer.encode(f"{after}\n")
    return Conversation(ids, answers)


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
        one = ask(rng, sheet, kind=kind if queries(sheet, kind) else "lookup")
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
    ids = encode_chat(tokenizer, messages)
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
