"""
Trains the demo model from random weights, with the shipped tokenizer, in 68 minutes on two cores.

    .venv/bin/python lab/scripts/train_demo_model.py --out DIR --minutes 68 --seed 1

DIR gets a model that loads like the shipped one, and the log of the run. demo_curriculum.py makes the
training data.
"""

import json
import logging
import math
import os
import random
import time
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaAttention

from demo_curriculum import STAGES, Batch, next_batch
from kvshare.demo import MODEL_PATH

log = logging.getLogger(__name__)

PEAK_RATE = 1.5e-3
WARMUP_STEPS = 50
DECAY_SHARE = 0.3  # of the time, at its end: the learning rate falls to 0
TEXT_WEIGHT = 0.05
REPORT_EVERY = 20

EMBEDDING_STD = 0.06
CONSTANT = 0.36  # the first coordinate of every embedding; it shifts all logits equally
SHARPNESS = 6.7  # length of the constant part of queries and keys, per frequency
NUM_TURNED = 6  # of the fastest rotations: those that are used to attend to a neighbouring token
NUM_FAST = 10  # of the fastest rotations: those that are not used to match words over hundreds of tokens
MATCH = 6.0  # how strongly equal words attract attention
COPY = 8.0  # weight of a copied word in the output, relative to the last word of the prompt


def build_model() -> LlamaForCausalLM:
    """A fresh Llama of the shipped one's size."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(MODEL_PATH))  # type: ignore[no-untyped-call]
    give_head_start(model)
    return model


@torch.no_grad()
def give_head_start(model: LlamaForCausalLM) -> None:
    """
    Initialise the model so that it copies repeated text; training may change all weights.

    Head h of the first layer attends to the token h + 1 places back and notes it in a subspace of its own.
    Head h of the second layer looks for a position where the token h places back is noted, so that all heads
    find the position after an earlier run of the same tokens, and copies the token there. Learning this from
    random weights took longer than all the rest.
    """
    config: Any = model.config
    width, head_dim = config.hidden_size, config.head_dim
    embedding = model.model.embed_tokens.weight
    torch.nn.init.normal_(embedding, std=EMBEDDING_STD)
    embedding[:, 0] = CONSTANT
    first, second = (model.model.layers[index].self_attn for index in (0, 1))
    _look_back(first, config)
    notes = torch.linalg.qr(torch.randn(width, width)).Q
    words = (torch.randn(head_dim, width) / math.sqrt(width)).repeat(config.num_attention_heads, 1)
    copies = torch.randn(width, width) / math.sqrt(width)
    words[:, 0] = copies[:, 0] = 0.0  # the constant says nothing about the token
    sought = torch.cat((words[:head_dim], notes.T[:-head_dim]))
    noted = notes.T.clone()
    noted[:, 0] = sought[:, 0] = 0.0
    slow = (torch.arange(width) % (head_dim // 2) >= NUM_FAST).float()[:, None]
    first.v_proj.weight.copy_(words)
    first.o_proj.weight.copy_(EMBEDDING_STD * notes)
    second.q_proj.weight.copy_(MATCH * slow * sought)
    second.k_proj.weight.copy_(slow * noted)
    second.v_proj.weight.copy_(copies)
    second.o_proj.weight.copy_(COPY * EMBEDDING_STD * copies.T)


def _look_back(attention: LlamaAttention, config: Any) -> None:
    """Use the constant coordinate to give all queries and keys one direction, and rotate the query's."""
    half = config.head_dim // 2
    after_norm = CONSTANT / math.sqrt(EMBEDDING_STD**2 + CONSTANT**2 / config.hidden_size)
    scale = SHARPNESS / after_norm
    for head in range(config.num_attention_heads):
        for frequency in range(NUM_TURNED):
            angle = (head + 1) * config.rope_parameters["rope_theta"] ** (-frequency / half)
            real = head * config.head_dim + frequency
            attention.k_proj.weight[real, 0] = scale
            attention.q_proj.weight[real, 0] = scale * math.cos(angle)
            attention.q_proj.weight[real + half, 0] = -scale * math.sin(angle)


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW, with weight decay on the matrices between the layers only."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))


def rate_at(step: int, *, share_left: float) -> float:
    """The learning rate: warm-up by steps, then constant, then linear to 0; `share_left` is the time left."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_RATE * warm * min(1.0, max(0.0, share_left / DECAY_SHARE))


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


def learn(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch) -> dict[str, float]:
    """One step. Returns the losses before it, and the share of answer tokens that were right."""
    answers, text, right = answer_losses(model, batch)
    torch.autograd.backward(answers + TEXT_WEIGHT * text)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": answers.item(), "text_loss": text.item(), "right": right.float().mean().item()}


def train(folder: Path, *, minutes: float, seed: int) -> None:
    """Train until the time is up; the folder then holds a model ready to load, its tokenizer and the log."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(MODEL_PATH)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    model = build_model()
    torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu")
    optimizer = build_optimizer(model)
    stage, step = 0, 0
    recent: deque[float] = deque(maxlen=30)
    began = time.monotonic()
    with (folder / "training_log.jsonl").open("w", encoding="utf-8", buffering=1) as lines:
        while (share_left := 1 - (time.monotonic() - began) / (60 * minutes)) > 0:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, share_left=share_left)
            batch = next_batch(random.Random(f"train-{seed}-{step}"), tokenizer, STAGES[stage])
            figures = learn(model, optimizer, batch)
            recent.append(figures["right"])
            if step % REPORT_EVERY == 0:
                line = json.dumps({"step": step, "stage": stage, **figures})
                lines.write(line + "\n")
                log.info("%s", line)
            learned = len(recent) == recent.maxlen and fmean(recent) >= STAGES[stage].enough
            if learned and stage + 1 < len(STAGES):
                stage += 1
                recent.clear()
            step += 1
    assert model.generation_config is not None
    model.generation_config.do_sample = False
    model.save_pretrained(folder)


def main(
    out: Annotated[Path, typer.Option()],
    minutes: float = 68.0,
    seed: int = 1,
    threads: int = os.cpu_count() or 1,
) -> None:
    """Train the KVShare demo model."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(threads)
    train(out, minutes=minutes, seed=seed)


if __name__ == "__main__":
    typer.run(main)
