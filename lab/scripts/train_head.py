"""
Trains a head that drafts for a chat model of Llama's kind, on the model's own answers to filled-in forms.

    .venv/bin/python lab/scripts/train_head.py --kind mtp --model DIR --out DIR --minutes 8 --seed 1

OUT gets a checkpoint for vLLM, and the log of the run: of a head (eagle, eagle3), or of the whole model with
its layer (mtp). `--answers FILE` has the answers of a run before, or gets them; `--computed FILE` the same of
what the model computes for them, for all kinds. On one machine the same `--seed` and `--steps` give the same
head; with `--minutes` the rate of learning follows the clock.
"""

import json
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvshare_lab.drafting.answers import (
    Answered,
    Sample,
    answered,
    form_prompts,
    read_answers,
    samples,
    write_answers,
)
from kvshare_lab.drafting.checkpoints import write
from kvshare_lab.drafting.networks import KINDS, head_of
from kvshare_lab.drafting.training import Limits, Vocabulary, train

log = logging.getLogger(__name__)

_HELD_OUT = 10  # one of so many answers is not learned from
_OTHERS = 2048  # words of a step that heads with the model's own words learn not to say


def _answers(
    network: Any, model: Path, path: Path | None, *, prompts: int, answer: int, longest: int, seed: int
) -> list[Answered]:
    if path is not None and path.exists():
        return read_answers(path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = answered(network, form_prompts(tokenizer, prompts, longest=longest, seed=seed), answer)
    if path is not None:
        write_answers(found, path)
    return found


def _computed(
    network: Any, path: Path | None, *, context: int, answers: Callable[[], list[Answered]]
) -> list[Sample]:
    if path is not None and path.exists():
        return [Sample(**each) for each in torch.load(path)]
    count = network.config.num_hidden_layers
    layers = (2, count // 2, count - 3)  # those of EAGLE3, as in vLLM, unless a head says others
    found = samples(network, answers(), context=context, aux_layers=layers)
    if path is not None:
        torch.save([{name: getattr(each, name) for name in Sample.__slots__} for each in found], path)
    return found


def main(
    model: Annotated[Path, typer.Option(help="A folder with a Llama that has a chat template.")],
    out: Annotated[Path, typer.Option(help="A new folder.")],
    kind: Annotated[str, typer.Option(help="One of eagle, eagle3 and mtp.")] = "eagle",
    answers: Annotated[Path | None, typer.Option(help="A file of answers, read or written.")] = None,
    computed: Annotated[Path | None, typer.Option(help="A file of hidden states, read or written.")] = None,
    minutes: Annotated[float, typer.Option(help="Of training, at most.")] = math.inf,
    steps: Annotated[int, typer.Option(help="Of training, at most.")] = 400,
    prompts: int = 192,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 96,
    longest: Annotated[int, typer.Option(help="Tokens of a prompt, at most.")] = 700,
    context: Annotated[int, typer.Option(help="Tokens before an answer that a head learns with.")] = 256,
    seed: int = 1,
) -> None:
    if kind not in KINDS:
        raise typer.BadParameter(f"expected one of {', '.join(KINDS)}, got {kind!r}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(seed)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).requires_grad_(False)
    began = time.monotonic()
    each = _computed(
        network,
        computed,
        context=context,
        answers=partial(
            _answers, network, model, answers, prompts=prompts, answer=answer, longest=longest, seed=seed
        ),
    )
    log.info("%d answers, after %.0f s", len(each), time.monotonic() - began)
    vocabulary = Vocabulary(network, each)
    head = head_of(kind, network.float(), vocabulary.used)
    kept = [sample for number, sample in enumerate(each) if number % _HELD_OUT]
    limits, others = Limits(steps, 60 * minutes), 0 if kind == "eagle3" else _OTHERS
    table = train(head, kept, each[::_HELD_OUT], vocabulary, limits, others=others)
    write(kind, head, vocabulary.used, model, out)
    lines = "".join(json.dumps(row) + "\n" for row in table)
    (out / "training_log.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
