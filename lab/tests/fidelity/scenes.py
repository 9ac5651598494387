"""
Small scenarios made of random tokens, tiny random Llamas, and a decoder written out in plain torch.

    edited     system A B C question         two values replaced in place: everything else keeps its position
    moved      system C A B question         the documents of two stored prompts in another order
    front      B A C question                no exact prefix; the first document comes from further behind
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from delta_tree import Span, TokenIds, token_ids
from kvshare.embedded.model import EmbeddedModel
from kvshare.kv.attention import PartialPass
from kvshare.kv.sequence import SequenceKV
from kvshare.settings import load_settings
from kvshare_lab.bench.random_configurations import TINY
from kvshare_lab.bench.random_models import VOCAB_SIZE
from kvshare_lab.fidelity.arms import make_trial
from kvshare_lab.fidelity.layered import LayeredModel
from kvshare_lab.fidelity.rows import Stage
from kvshare_lab.fidelity.scenario import Prompt, Scenario
from kvshare_lab.fidelity.trial import Trial

SETTINGS = load_settings()
TAIL = SETTINGS.repair.tail
CLOSE = 2e-5  # float32 along two ways

Rows = torch.Tensor
NextRows = Callable[[int, Rows, torch.Tensor, torch.Tensor], Rows]


@cache
def llama(num_layers: int = 4, *, dtype: torch.dtype = torch.float32) -> LayeredModel:
    """A Llama whose answers never end; attention is far from uniform."""
    torch.manual_seed(7)
    config = LlamaConfig(**{**TINY, "num_hidden_layers": num_layers, "eos_token_id": None})
    network = LlamaForCausalLM(config).train(False)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.12)
    return LayeredModel(EmbeddedModel(network.to(dtype), name=f"llama-{num_layers}"))


def text(seed: int, length: int) -> TokenIds:
    return token_ids(np.random.default_rng(seed).integers(3, VOCAB_SIZE, length))


def replaced(tokens: TokenIds, place: int, length: int = 3) -> TokenIds:
    """The same text with some of its tokens changed."""
    other = tokens.copy()
    other[place : place + length] = (other[place : place + length] + 11) % (VOCAB_SIZE - 3) + 3
    return token_ids(other)


def prompt(*texts: TokenIds) -> Prompt:
    """A prompt with a part a text."""
    ends = np.cumsum([len(each) for each in texts]).tolist()
    parts = tuple(Span(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))
    return Prompt(token_ids(np.concatenate(texts)), parts)


def scenario(
    stored: Sequence[Prompt],
    new: Prompt,
    *,
    candidates: Sequence[TokenIds] = (),
    stages: Sequence[Prompt] = (),
    reordered: Prompt | None = None,
    expected: str | None = None,
) -> Scenario:
    return Scenario(
        suite="hand-made",
        number=0,
        source="none",
        labels={"kind": "random"},
        stored=tuple(stored),
        prompt=new,
        candidates=tuple(candidates),
        expected=expected,
        reordered=reordered,
        stages=tuple(stages),
    )


SYSTEM, A, B, C, QUESTION = text(1, 40), text(2, 60), text(3, 56), text(4, 50), text(5, 24)
CANDIDATES = (text(6, 3), text(7, 5), text(8, 1))
EDITS = (20, 30)  # where in A and in B three tokens differ


def edited() -> Scenario:
    stored = prompt(SYSTEM, A, B, C, QUESTION)
    new = prompt(SYSTEM, replaced(A, EDITS[0]), replaced(B, EDITS[1]), C, QUESTION)
    return scenario([stored], new, candidates=CANDIDATES)


def moved() -> Scenario:
    stored = [prompt(SYSTEM, A, B, text(9, 20)), prompt(SYSTEM, B, C, text(10, 20))]
    return scenario(stored, prompt(SYSTEM, C, A, B, QUESTION), candidates=CANDIDATES)


def front() -> Scenario:
    stored = prompt(SYSTEM, A, B, C, text(11, 20))
    return scenario([stored], prompt(B, A, C, QUESTION), candidates=CANDIDATES)


SCENES: dict[str, Callable[[], Scenario]] = {"edited": edited, "moved": moved, "front": front}


scenes = pytest.mark.parametrize("scene", sorted(SCENES))


def stage(*rules: str, budgets: Sequence[float] = (0.2,), **more: object) -> Stage:
    """How rules are measured, with candidates ranked."""
    fields = {"name": "made", "half": 0, "plans": {}, "rules": rules, "budgets": budgets, "rank": True}
    return Stage.model_validate(fields | more)


def trial_of(made: Scenario, num_layers: int = 4) -> Trial:
    trial = make_trial(made, llama(num_layers), SETTINGS)
    assert trial is not None
    return trial


@cache
def trial(scene: str, num_layers: int = 4) -> Trial:
    """Computed once a test run: nothing that a rule does changes a trial."""
    return trial_of(SCENES[scene](), num_layers)


def places(mask: np.ndarray) -> list[int]:
    return [int(place) for place in np.flatnonzero(mask)]


def best(scores: np.ndarray, allowed: np.ndarray, count: int) -> list[int]:
    """The `count` allowed places with the highest scores, sorted by place."""
    return sorted(sorted(places(allowed), key=lambda place: -scores[place])[:count])


def engine_kv(model: LayeredModel, tokens: TokenIds) -> SequenceKV:
    """The KV of a prompt by the product's own pass."""
    kv = model.model.new_sequence(len(tokens))
    model.model.compute(PartialPass(kv, (Span(0, len(tokens)),)), tokens)
    return kv


def placed_by_hand(made: Trial) -> tuple[torch.Tensor, torch.Tensor]:
    """What the plan copies, (L, T, H, D) each: the product's KV of the stored prompts, keys rotated."""
    rotation = made.model.model.layout.rotation
    assert rotation is not None
    stored = {
        node_id: engine_kv(made.model, done.prompt.token_ids)
        for node_id, done in made.stored.prefills.items()
    }
    some = next(iter(stored.values()))
    k = torch.zeros(made.num_layers, made.num_tokens, *some.k.shape[2:])
    v = torch.zeros_like(k)
    for copy in made.copies:
        source = slice(copy.donor_start, copy.donor_start + copy.length)
        target = slice(copy.target_start, copy.target_start + copy.length)
        k[:, target] = rotation.moved(stored[copy.donor].k[:, source], copy.target_start - copy.donor_start)
        v[:, target] = stored[copy.donor].v[:, source]
    return k, v


@dataclass(frozen=True, eq=False)
class Dense:
    """What the written-out decoder came to."""

    k: torch.Tensor  # (L, T, H, D)
    v: torch.Tensor
    log_probabilities: torch.Tensor  # (N, V) of the rows that are left
    attention: list[torch.Tensor]  # by layer (H_q, N, T)


def dense(
    model: LayeredModel,
    tokens: TokenIds,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Rows,
    next_rows: NextRows = lambda layer, rows, k, v: rows,
) -> Dense:
    """
    A Llama in double precision over some rows of a prompt whose other rows are given.

    `next_rows`: a layer, its rows and their fresh K and V (N, H, D) -> the rows that the next layer has.
    """
    network = model.model.network
    config = network.config
    assert isinstance(config, LlamaConfig)
    weights = {name: value.double() for name, value in network.state_dict().items()}
    k, v, attention = k.double().clone(), v.double().clone(), []
    x = weights["model.embed_tokens.weight"][torch.from_numpy(tokens.astype(np.int64))[rows]]
    for number in range(config.num_hidden_layers):
        own = {
            name.split(f"layers.{number}.")[1]: value
            for name, value in weights.items()
            if f".layers.{number}." in name
        }
        h = _normed(x, own["input_layernorm.weight"], config.rms_norm_eps)
        q, fresh_k, fresh_v = (
            (h @ own[f"self_attn.{name}_proj.weight"].T).view(len(rows), -1, k.shape[-1]) for name in "qkv"
        )
        q, fresh_k = _rotated(q, rows, config), _rotated(fresh_k, rows, config)
        k[number, rows], v[number, rows] = fresh_k, fresh_v
        seen, out = _attended(q, k[number], v[number], rows)
        attention.append(seen)
        x = x + out @ own["self_attn.o_proj.weight"].T
        h = _normed(x, own["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate = torch.nn.functional.silu(h @ own["mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
        if number + 1 < config.num_hidden_layers:
            left = next_rows(number, rows, fresh_k, fresh_v)
            x, rows = x[torch.isin(rows, left)], left
    x = _normed(x, weights["model.norm.weight"], config.rms_norm_eps)
    return Dense(k, v, torch.log_softmax(x @ weights["lm_head.weight"].T, dim=-1), attention)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def _rotated(rows: torch.Tensor, positions: Rows, config: LlamaConfig) -> torch.Tensor:
    """Each pair (i, i + D/2) of a head as a complex number, turned by its position."""
    half = rows.shape[-1] // 2
    assert config.rope_parameters is not None
    theta = config.rope_parameters["rope_theta"]
    assert theta is not None
    frequencies = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    turns = torch.polar(torch.ones(1, dtype=torch.float64), positions.double()[:, None] * frequencies)
    turned = torch.complex(rows[..., :half], rows[..., half:]) * turns[:, None, :]
    return torch.cat((turned.real, turned.imag), dim=-1)


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention (H_q, N, T), and its output (N, H_q x D)."""
    groups = q.shape[1] // k.shape[1]
    future = torch.arange(len(k))[None, :] > rows[:, None]
    seen, out = [], []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // groups].T / math.sqrt(q.shape[-1])
        seen.append(scores.masked_fill(future, -math.inf).softmax(dim=-1))
        out.append(seen[-1] @ v[:, head // groups])
    return torch.stack(seen), torch.cat(out, dim=-1)
