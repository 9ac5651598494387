"""
Trains an EAGLE head for a chat model on the model's own answers to filled-in forms, in minutes on two cores.

    .venv/bin/python lab/scripts/train_head.py --model DIR --out DIR --minutes 3 --seed 1

OUT gets a checkpoint for vLLM (method eagle), and the log of the run. The head learns to predict the model's
next hidden state and its most likely word after it; its words are embedded and predicted as by the model.
"""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, smooth_l1_loss
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from kvshare.replay.workloads import generate
from kvshare_lab.vllm.heads import write_head

log = logging.getLogger(__name__)

_BATCH = 8
_PEAK_RATE = 1e-3
_NOISE = 0.05  # added to hidden states, since later drafts read the head's own
_REGRESSION = 1.0  # weight of the loss of hidden states


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """
    A prompt and its answer.

    Shapes:  token_ids (T,); hidden (T, E) of the last layer, after the norm; best (T,) the likeliest next
    """

    token_ids: Tensor
    hidden: Tensor
    best: Tensor
    num_prompt: int


class Head(nn.Module):
    """As vLLM's EagleLlamaForCausalLM: no norm before attention, and none after the layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)
        with torch.no_grad():
            self.fc.weight.copy_(torch.cat([torch.zeros(width, width), torch.eye(width)], dim=1))

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """(1, T, E)  Shapes:  embedded (1, T, E) of the following words; hidden (1, T, E)"""
        states = self.fc(torch.cat([embedded, hidden], dim=-1))
        places = torch.arange(states.shape[1])[None]
        mask = torch.full((states.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        found = self.layers[0](
            states,
            attention_mask=mask,
            position_ids=places,
            position_embeddings=self.rotary(states, places),
        )
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out


@torch.no_grad()
def answered(model: PreTrainedModel, prompts: Sequence[list[int]], num_answer: int) -> list[Sample]:
    """The model's greedy answers."""
    samples = []
    pad = model.config.pad_token_id or 0
    for first in range(0, len(prompts), _BATCH):
        batch = prompts[first : first + _BATCH]
        longest = max(map(len, batch))
        ids = torch.tensor([[pad] * (longest - len(each)) + each for each in batch])
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in batch])
        whole = model.generate(  # type: ignore[operator]  # wrapped without types
            ids, attention_mask=mask, max_new_tokens=num_answer, min_new_tokens=num_answer, do_sample=False
        )
        for row, prompt in zip(whole, batch, strict=True):
            tokens = row[longest - len(prompt) :]
            hidden = model.model(tokens[None]).last_hidden_state[0]
            best = model.lm_head(hidden).argmax(dim=-1)
            samples.append(Sample(tokens.clone(), hidden.clone(), best.clone(), len(prompt)))
        log.info("%d of %d prompts are answered", len(samples), len(prompts))
    return samples


def loss_of(head: Head, model: Any, sample: Sample, *, noise: float) -> tuple[Tensor, float]:
    """The loss over the answer, and how many first drafts are accepted."""
    embedded = model.model.embed_tokens(sample.token_ids[1:])[None]
    hidden = sample.hidden[:-1][None]
    out = head(embedded, hidden + noise * torch.randn_like(hidden))[0, sample.num_prompt - 1 :]
    logits, best = model.lm_head(out), sample.best[sample.num_prompt :]
    regression = smooth_l1_loss(out, sample.hidden[sample.num_prompt :])
    accepted = (logits.argmax(dim=-1) == best).float().mean()
    return cross_entropy(logits, best) + _REGRESSION * regression, float(accepted)


def train(
    head: Head, model: Any, samples: Sequence[Sample], held_out: Sequence[Sample], minutes: float
) -> Any:
    """Until the time is over. Returns the log's rows."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=_PEAK_RATE, weight_decay=0.01)
    began, rows, step = time.monotonic(), [], 0
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = _PEAK_RATE * min(1.0, (step + 1) / 20) * (1 - share)
        chosen = torch.randint(len(samples), (_BATCH,)).tolist()
        losses = [loss_of(head, model, samples[number], noise=_NOISE) for number in chosen]
        optimizer.zero_grad()
        torch.stack([loss for loss, _ in losses]).mean().backward()  # type: ignore[no-untyped-call]  # torch
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            rows.append(_row(step, losses, [loss_of(head, model, s, noise=0.0) for s in held_out]))
            log.info("%s", rows[-1])
    with torch.no_grad():
        rows.append(_row(step, losses, [loss_of(head, model, sample, noise=0.0) for sample in held_out]))
    return rows


def _row(step: int, losses: Sequence[Any], held_out: Sequence[Any]) -> dict[str, float]:
    def mean(values: Sequence[float]) -> float:
        return round(sum(values) / len(values), 3)

    return {
        "step": step,
        "loss": mean([float(loss.detach()) for loss, _ in losses]),
        "accepted": mean([accepted for _, accepted in losses]),
        "held_out": mean([accepted for _, accepted in held_out]),
    }


def _prompt(tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def main(
    model: Annotated[Path, typer.Option(help="A folder with a Llama that has a chat template.")],
    out: Annotated[Path, typer.Option(help="A new folder.")],
    minutes: float = 3.0,
    prompts: int = 64,
    answer: int = 64,
    longest: int = 420,
    seed: int = 1,
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).requires_grad_(False)
    rows = generate("template", num_requests=6 * prompts, seed=seed)
    tokens = [_prompt(tokenizer, row.messages) for row in rows]
    short = [each for each in tokens if len(each) <= longest][:prompts]
    if len(short) < _BATCH:
        raise typer.BadParameter(f"{len(short)} prompts have at most {longest} tokens")
    samples = answered(network, short, answer)
    head = Head(LlamaConfig.from_pretrained(model, attn_implementation="sdpa"))
    num_held = max(1, len(samples) // 10)
    table = train(head, network, samples[num_held:], samples[:num_held], minutes)
    write_head({n: w for n, w in head.state_dict().items() if not n.startswith("rotary")}, model, out)
    (out / "training_log.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in table), encoding="utf-8"
    )


if __name__ == "__main__":
    typer.run(main)
