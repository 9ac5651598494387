"""
How often the demo model is right on forms it has not seen: `python -m kvshare.demo.evaluate`.

Every question is asked alone, in a fresh chat, and answered greedily under full prefill; only
an exact match counts. Knows nothing of training.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvshare.demo import MODEL_PATH
from kvshare.demo.questions import KINDS, Kind, Question, ask, queries
from kvshare.demo.sheets import MAX_RECORDS, make_sheet, to_messages
from kvshare.demo.tokenizer import encode_chat, load_tokenizer

MAX_ANSWER_TOKENS = 6
HELD_OUT_SEED = 1


@dataclass(frozen=True, slots=True)
class Case:
    """One held-out question with its prompt."""

    messages: list[dict[str, str]]
    question: Question
    num_records: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the model said to a case."""

    case: Case
    said: str
    num_prompt_tokens: int

    @property
    def right(self) -> bool:
        """Whether the answer is exactly the right one."""
        return self.said == self.case.question.answer


def held_out_cases(count: int, *, seed: int = HELD_OUT_SEED) -> Iterator[Case]:
    """Questions on sheets that no training stream makes; kinds and sizes in turn."""
    rng = random.Random(f"held-out-{seed}")
    shapes = [(k, n) for n in range(1, MAX_RECORDS + 1) for k in KINDS if n > 1 or k != "compare"]
    for index in range(count):
        kind, num_records = shapes[index % len(shapes)]
        sheet = make_sheet(rng, num_records=num_records)
        while not queries(sheet, kind):  # no value leads the others clearly
            sheet = make_sheet(rng, num_records=num_records)
        question = ask(rng, sheet, kind=kind)
        yield Case(to_messages(sheet, question.text), question, num_records)


def load_model(folder: Path = MODEL_PATH) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model, in float32 and ready to answer, and its tokenizer."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()  # type: ignore[no-untyped-call]  # torch has no hint here
    return model, load_tokenizer(folder)


@torch.inference_mode()
def answer(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    """The greedy answer to a prompt, both as token ids, without the end token."""
    said: list[int] = []
    fed, cache = torch.tensor([prompt]), None
    while len(said) < MAX_ANSWER_TOKENS:
        out = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = int(out.logits[0, -1].argmax())
        if token == model.config.eos_token_id:
            break
        said.append(token)
        fed, cache = torch.tensor([[token]]), out.past_key_values
    return said


def evaluate(folder: Path, count: int, *, seed: int = HELD_OUT_SEED) -> list[Outcome]:
    """Ask the model in that folder `count` held-out questions."""
    model, tokenizer = load_model(folder)
    outcomes = []
    for case in held_out_cases(count, seed=seed):
        prompt = encode_chat(tokenizer, case.messages, reply=True)
        said = str(tokenizer.decode(answer(model, prompt))).strip()
        outcomes.append(Outcome(case, said, len(prompt)))
    return outcomes


def summary(outcomes: list[Outcome]) -> dict[str, object]:
    """
    Accuracy overall, by kind, by number of records, and for both together.

    Raises:  ValueError if there are no outcomes
    """
    if not outcomes:
        raise ValueError("no outcomes to sum up")
    lengths = [outcome.num_prompt_tokens for outcome in outcomes]
    sizes = sorted({outcome.case.num_records for outcome in outcomes})
    return {
        "num_questions": len(outcomes),
        "prompt_tokens": {"shortest": min(lengths), "longest": max(lengths)},
        "accuracy": _share(outcomes),
        "by_kind": {kind: _share(_of(outcomes, kind=kind)) for kind in KINDS},
        "by_records": {str(size): _share(_of(outcomes, size=size)) for size in sizes},
        "by_kind_and_records": {
            f"{kind}, {size}": _share(chosen)
            for kind in KINDS
            for size in sizes
            if (chosen := _of(outcomes, kind=kind, size=size))
        },
    }


def table(outcomes: list[Outcome]) -> str:
    """The accuracies as a small table: a row for each kind, a column for each size."""
    sizes = range(1, MAX_RECORDS + 1)
    rows = ["records " + "".join(f"{size:>8}" for size in (*sizes, "all"))]
    for kind in (*KINDS, None):
        groups = [_of(outcomes, kind=kind, size=size) for size in (*sizes, None)]
        cells = (f"{_share(group):.1%}" if group else "-" for group in groups)
        rows.append(f"{kind or 'all':8}" + "".join(f"{cell:>8}" for cell in cells))
    return "\n".join(rows)


def _of(outcomes: list[Outcome], *, kind: Kind | None = None, size: int | None = None) -> list[Outcome]:
    return [
        outcome
        for outcome in outcomes
        if (kind is None or outcome.case.question.kind == kind)
        and (size is None or outcome.case.num_records == size)
    ]


def _share(outcomes: list[Outcome]) -> float:
    return round(sum(outcome.right for outcome in outcomes) / len(outcomes), 4)


def main() -> None:
    """Read the command line, evaluate and print."""
    parser = argparse.ArgumentParser(description="Held-out accuracy of the demo model.")
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--questions", type=int, default=1100)
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    outcomes = evaluate(arguments.model, arguments.questions, seed=arguments.seed)
    figures = json.dumps(summary(outcomes), indent=2) if arguments.json else table(outcomes)
    sys.stdout.write(f"{figures}\n")


if __name__ == "__main__":
    main()
