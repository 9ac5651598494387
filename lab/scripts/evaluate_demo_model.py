"""
Measures how often the demo model answers correctly on forms it has not seen; prints JSON.

    .venv/bin/python lab/scripts/evaluate_demo_model.py --questions 1100

Every question is asked alone, in a fresh chat, and answered greedily under full prefill in float32; only an
exact match counts.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvshare.demo import MODEL_PATH
from kvshare_lab.demo_model.pairs import KINDS, Question, ask, queries
from kvshare_lab.demo_model.sheets import MAX_RECORDS, make_sheet, to_messages

MAX_ANSWER_TOKENS = 6
HELD_OUT_SEED = 1


def held_out_questions(count: int, *, seed: int) -> Iterator[tuple[Question, int, list[dict[str, str]]]]:
    """Questions with number of records and messages, of sheets that no training stream makes."""
    rng = random.Random(f"held-out-{seed}")
    shapes = [(k, n) for n in range(1, MAX_RECORDS + 1) for k in KINDS if n > 1 or k != "compare"]
    for index in range(count):
        kind, num_records = shapes[index % len(shapes)]
        sheet = make_sheet(rng, num_records=num_records)
        while not queries(sheet, kind):  # no value leads the others clearly
            sheet = make_sheet(rng, num_records=num_records)
        question = ask(rng, sheet, kind=kind)
        yield question, num_records, to_messages(sheet, question.text)


@torch.inference_mode()
def evaluate(folder: Path, count: int, *, seed: int = HELD_OUT_SEED) -> dict[str, Any]:
    """Accuracy of the model in that folder: overall, by kind, by number of records, and by both together."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    groups: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    lengths = []
    for question, num_records, messages in held_out_questions(count, seed=seed):
        prompt: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        lengths.append(prompt.shape[1])
        said = model.generate(prompt, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)[0, lengths[-1] :]
        is_right = str(tokenizer.decode(said, skip_special_tokens=True)).strip() == question.answer
        kind, size = question.query.kind, str(num_records)
        names = {"by_kind": kind, "by_records": size, "by_kind_and_records": f"{kind}, {size}"}
        for grouping, name in {"all": "all", **names}.items():
            groups[grouping][name].append(is_right)
    shares = {
        grouping: {name: round(fmean(right), 4) for name, right in sorted(members.items())}
        for grouping, members in groups.items()
    }
    return {
        "num_questions": len(lengths),
        "prompt_tokens": {"shortest": min(lengths), "longest": max(lengths)},
        "accuracy": shares.pop("all")["all"],
        **shares,
    }


def main(
    model: Path = MODEL_PATH, questions: Annotated[int, typer.Option(min=1)] = 1100, seed: int = HELD_OUT_SEED
) -> None:
    """Held-out accuracy of the demo model, as JSON."""
    typer.echo(json.dumps(evaluate(model, questions, seed=seed), indent=2))


if __name__ == "__main__":
    typer.run(main)
