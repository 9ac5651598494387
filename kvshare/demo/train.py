"""
Train the demo model from nothing: `python -m kvshare.demo.train --out DIR --minutes 68 --seed 1`.

Owns the loop, the learning rate and the checkpoints; what is shown when is in curriculum.
A run that was stopped goes on from its last checkpoint when started again with the same
folder; `--minutes` counts training time over all starts and may be changed in between.
"""

import argparse
import json
import logging
import os
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from kvshare.demo.architecture import build_model
from kvshare.demo.batches import Batch, Scores, next_batch
from kvshare.demo.curriculum import STAGES, Stage
from kvshare.demo.tokenizer import load_tokenizer, train_tokenizer

log = logging.getLogger(__name__)

PEAK_RATE = 1.5e-3
WARMUP_STEPS = 50
DECAY_SHARE = 0.3
"""Over this last share of the time the learning rate falls to nothing."""
TEXT_WEIGHT = 0.05
SAVE_EVERY_S = 60.0
REPORT_EVERY = 20
HELD_OUT_EVERY = 200


@dataclass(slots=True)
class Progress:
    """How far a run has come; saved with every checkpoint."""

    step: int = 0
    stage: int = 0
    seconds: float = 0.0
    tokens: int = 0
    recent: list[float] = field(default_factory=list)


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW, with weight decay on the matrices between the layers only."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    groups = [
        {"params": matrices, "weight_decay": 0.01},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))


def rate_at(progress: Progress, minutes: float) -> float:
    """Warm-up by steps, then flat, then a linear fall to nothing by time."""
    warm = min(1.0, (progress.step + 1) / WARMUP_STEPS)
    left = 1.0 - progress.seconds / (60.0 * minutes)
    return PEAK_RATE * warm * min(1.0, max(0.0, left / DECAY_SHARE))


def answer_losses(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Mean loss on answers, mean loss on sampled text, and which answer tokens were right."""
    device = model.device
    with torch.autocast(device.type, dtype=torch.bfloat16):
        hidden = model.model(input_ids=batch.ids.to(device), use_cache=False).last_hidden_state
        places = torch.cat((batch.answer_places, batch.text_places)).to(device)
        logits = model.lm_head(hidden.flatten(0, 1)[places])
    targets = batch.ids.to(device).flatten()[places + 1]
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    num_answers = len(batch.answer_places)
    answers, text = losses[:num_answers], losses[num_answers:]
    right = logits[:num_answers].argmax(-1) == targets[:num_answers]
    return answers.mean(), text.mean() if len(text) else answers.new_zeros(()), right.cpu()


class Run:
    """One training run in one folder."""

    def __init__(self, folder: Path, *, minutes: float, seed: int) -> None:
        self._folder, self._minutes, self._seed = folder, minutes, seed
        self._checkpoint = folder / "checkpoint.pt"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "tokenizer.json").exists():
            train_tokenizer(seed).save_pretrained(folder)
        self._tokenizer = load_tokenizer(folder)
        torch.manual_seed(seed)
        self._model = build_model(self._tokenizer)
        if torch.cuda.is_available():
            torch.nn.Module.cuda(self._model)  # the model's own method has no usable hint
        self._optimizer = build_optimizer(self._model)
        self._progress = Progress()
        self._scores = Scores()
        if self._checkpoint.exists():
            self._resume()

    def train(self) -> None:
        """Go on until the time is up; the folder then holds a model ready to load."""
        saved = started = time.monotonic()
        before = self._progress.seconds
        while self._progress.seconds < 60.0 * self._minutes:
            self._step(STAGES[self._progress.stage])
            self._progress.seconds = before + time.monotonic() - started
            self._advance()
            if time.monotonic() - saved > SAVE_EVERY_S:
                self._save()
                saved = time.monotonic()
        self._save()

    def _step(self, stage: Stage) -> None:
        progress = self._progress
        rng = random.Random(f"train-{self._seed}-{progress.step}")
        batch = next_batch(rng, self._tokenizer, stage)
        answers, text, right = answer_losses(self._model, batch)
        torch.autograd.backward(answers + TEXT_WEIGHT * text)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = rate_at(progress, self._minutes)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += batch.ids.numel()
        progress.recent = [*progress.recent[-29:], right.float().mean().item()]
        self._scores.add(batch, right, answers.item(), text.item())
        if progress.step % REPORT_EVERY == 0:
            self._report("train", self._scores.take())
        if progress.step % HELD_OUT_EVERY == 0:
            self._report("held_out", self._held_out())

    @torch.no_grad()
    def _held_out(self) -> dict[str, float]:
        """Accuracy on whole forms that no training stream makes."""
        scores = Scores()
        for index in range(4):
            rng = random.Random(f"held-out-while-training-{index}")
            batch = next_batch(rng, self._tokenizer, STAGES[-1], num_records=index + 1)
            answers, text, right = answer_losses(self._model, batch)
            scores.add(batch, right, answers.item(), text.item())
        return scores.take()

    def _advance(self) -> None:
        """To the next stage once this one is learned."""
        progress, stage = self._progress, STAGES[self._progress.stage]
        recent = progress.recent
        learned = len(recent) >= 30 and sum(recent) / len(recent) >= stage.enough
        if learned and progress.stage + 1 < len(STAGES):
            progress.stage += 1
            progress.recent = []
            log.info("stage %d from step %d", progress.stage, progress.step)

    def _report(self, what: str, figures: dict[str, float]) -> None:
        progress = self._progress
        line = {
            "what": what,
            "step": progress.step,
            "stage": progress.stage,
            "minutes": round(progress.seconds / 60, 2),
            "tokens": progress.tokens,
            "rate": round(rate_at(progress, self._minutes), 6),
        } | {name: round(value, 4) for name, value in figures.items()}
        with (self._folder / "training_log.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        log.info("%s", json.dumps(line))

    def _save(self) -> None:
        unfinished = self._checkpoint.with_suffix(".part")
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": asdict(self._progress),
        }
        torch.save(state, unfinished)
        os.replace(unfinished, self._checkpoint)
        generation = self._model.generation_config
        if generation is not None:
            generation.do_sample = False
        self._model.save_pretrained(self._folder)

    def _resume(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._progress = Progress(**state["progress"])


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train the KVShare demo model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=68.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(arguments.threads)
    Run(arguments.out, minutes=arguments.minutes, seed=arguments.seed).train()


if __name__ == "__main__":
    main()
