"""
`kvshare bench acceptance`: whether drafts are accepted as often after a shared prefill as after a full one.

One vLLM with the connector and speculative decoding, a small random model, tickets made here and no proxy. A
prompt is stored; then the same prompt with some tokens replaced is answered twice: computed in full, and with
the KV of what it has in common; after each edit some tokens are computed again, as a server repairs by place.
`tokens_a_step` is what a step after the first token gives, by the connector's report: accepted drafts and the
one token that each step adds.
    ngram   drafts from the text; the answer has two tokens only, so that it repeats itself
    draft   the draft model is the target itself, so that a full prefill's drafts are all accepted
    eagle   the model's first layer alone predicts, and its head computes it too (heads.py); or `--head`
            for `--model`
    eagle3  `--head` for `--model` only
    mtp     as eagle, with the layer in the model's folder (mtp.py); or `--model`, which has one
`lab/scripts/train_head.py` trains heads. `passed`: a full prefill gives at least 1.8 tokens a step, shared
ones .97 of its own, and their whole answers come no later. `answer_s`: medians of the seconds until then.
`share_interval`: 95 % of the share, by a bootstrap over prompts.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from delta_tree import Span, TokenIds
from kvshare.errors import ConfigError
from kvshare.fleet.client import ControlClient
from kvshare.http_client import session as http_session
from kvshare.settings import load_settings
from kvshare.vllm_protocol.messages import FinishedReport, WireCopy
from kvshare_lab.bench.random_models import copy_tokenizer, write_model
from kvshare_lab.vllm import servers
from kvshare_lab.vllm.client import Answer, Client
from kvshare_lab.vllm.form_pairs import Pair, form_pairs
from kvshare_lab.vllm.heads import write_fitting_pair
from kvshare_lab.vllm.mtp import write_fitting_mtp
from kvshare_lab.vllm.prompts import unrelated_prompt
from kvshare_lab.vllm.session import Watch
from kvshare_lab.vllm.stack import BenchConfig, StackOptions, document
from kvshare_lab.vllm.tickets import TicketWriter, copies_of

METHODS = ("ngram", "draft", "eagle", "eagle3", "mtp")
_WITH_HEAD = ("eagle", "eagle3")  # in a folder of its own
ENOUGH, LEAST = 1.8, 0.97  # tokens a step of a full prefill; the share of them that a shared one must give
_DRAFTS = 3  # tokens
_TWO_TOKENS: Mapping[str, Any] = {"allowed_token_ids": [5, 9]}
_CHANGED = 8  # tokens in the middle of each fifth of a prompt
_CONTROL_TIMEOUT_S = 60.0
_ARMS = ("full", "shared")
_BOOTSTRAPS = 2000


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    """
    `method`: one of METHODS. `head`: a folder, of a head for a model that is not random. `compiled`: as vLLM
    is by default.
    """

    method: str = "ngram"
    head: Path | None = None
    compiled: bool = False
    tokens: int = 2000
    answer: int = 100
    repeats: int = 5

    @property
    def own_model(self) -> str:
        return "small"

    @property
    def options(self) -> StackOptions:
        length = self.tokens + self.answer + 1
        vllm = replace(self.vllm, dtype="float32", max_model_len=length, enforce_eager=not self.compiled)
        return self.stack_of(vllm, kv_bytes=256 * 2**20)

    def pairs(self) -> Iterator[Pair]:
        """Edited prompts: of random tokens, or filled-in forms for a model that is not random."""
        if self.options.has_random_weights:
            rng = np.random.default_rng(self.seed)
            return (_edited(rng, self.tokens) for _ in count())
        return form_pairs(self.options.model, self.tokens, seed=self.seed)

    def speculation(self, drafts_by: str) -> Mapping[str, Any]:
        """vLLM's speculative_config, with a draft model or head. Raises ConfigError for an unknown method."""
        drafts = {"num_speculative_tokens": _DRAFTS}
        if self.method == "ngram":
            return {"method": "ngram", **drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        if self.method == "draft":
            length = self.options.vllm.max_model_len
            return {"method": "draft_model", **drafts, "model": drafts_by, "max_model_len": length}
        if self.method == "mtp":
            return {"method": "mtp", **drafts}
        if self.method in METHODS:
            return {"method": self.method, **drafts, "model": drafts_by}
        raise ConfigError("--method", f"expected one of {', '.join(METHODS)}, got {self.method!r}")


def run(config: Config) -> dict[str, Any]:
    """Tokens a step and seconds of both arms."""
    options = config.options
    with tempfile.TemporaryDirectory(prefix="kvshare-bench-") as name:
        folder = Path(name)
        model, drafts_by = _models(config, folder)
        vllm, token = replace(options.vllm, speculation=config.speculation(drafts_by)), servers.new_token()
        shared = servers.shared_vllm(model, folder, vllm, kv_bytes=options.kv_bytes, token=token)
        with servers.running([shared]):
            measured = asyncio.run(_measure(shared, token, config))
    return {**document("acceptance", options, config), **measured}


def _models(config: Config, folder: Path) -> tuple[str, str]:
    """The target, and what drafts for it. Raises ConfigError for a model that has no head."""
    options, method = config.options, config.method
    if not options.has_random_weights:
        if method not in _WITH_HEAD:
            return options.model, options.model
        if config.head is None:
            raise ConfigError("--head", f"expected a head of {options.model}, as it is not a random model")
        return options.model, str(config.head)
    if method == "eagle3":
        raise ConfigError("--model", "expected a model with eagle3, and its --head: no random model has one")
    length, pair, head = options.vllm.max_model_len, folder / "pair", folder / "head"
    written = write_model(
        options.model, folder / "model", dtype="float32", max_model_len=length, seed=config.seed
    )
    if method not in ("eagle", "mtp"):
        return str(written), str(written)
    if method == "eagle":
        write_fitting_pair(written, pair, head)
    else:
        write_fitting_mtp(written, pair)
    copy_tokenizer(pair)
    return str(pair), str(head)


async def _measure(server: servers.Server, token: str, config: Config) -> dict[str, Any]:
    assert server.control_url is not None, "it has the connector"
    pairs = config.pairs()
    async with (
        http_session(server.url, key=None) as session,
        ControlClient(server.control_url, token=token, timeout_s=_CONTROL_TIMEOUT_S) as control,
    ):
        tickets = TicketWriter(Client(session), Watch(control), "acceptance")
        await tickets.check()
        found: dict[str, list[tuple[Answer, FinishedReport]]] = {arm: [] for arm in _ARMS}
        for number in range(1 + config.repeats):  # the first of each arm warms the server up
            pair = next(pairs)
            stored = await tickets.store(pair.prompt)
            common = _behind_repairs(pair.common, load_settings().repair.edit_window)
            copies = [c for span, start in common for c in copies_of(stored, span, start)]
            arms: Sequence[tuple[str, Sequence[WireCopy]]] = (("full", ()), ("shared", copies))
            for arm, own in arms[:: -1 if number % 2 else 1]:
                answered = await _answer(tickets, pair.edited, own, config)
                if number:
                    found[arm].append(answered)
    return summary(found)


async def _answer(
    tickets: TicketWriter, prompt: TokenIds, copies: Sequence[WireCopy], config: Config
) -> tuple[Answer, FinishedReport]:
    extra = _TWO_TOKENS if config.method == "ngram" else {}
    return await tickets.ask(prompt, copies, max_tokens=config.answer, extra=extra)


def _behind_repairs(common: Sequence[tuple[Span, int]], window: int) -> list[tuple[Span, int]]:
    """What is copied if so many tokens after each edit are computed again."""
    return [
        (Span(span.start + own, span.end), start + own)
        for span, start in common
        if (own := window if start else 0) < len(span)
    ]


def _edited(rng: np.random.Generator, num_tokens: int) -> Pair:
    """A prompt, and the same with other tokens in five places."""
    prompt, other = (unrelated_prompt(rng, num_tokens) for _ in range(2))
    edited, common, end = np.array(prompt), [], 0
    for number in range(5):
        start = (2 * number + 1) * num_tokens // 10
        edited[start : start + _CHANGED] = other[start : start + _CHANGED]
        common.append((Span(end, start), end))
        end = start + _CHANGED
    common.append((Span(end, num_tokens - 1), end))
    return Pair(prompt, edited.astype(prompt.dtype), common)


def summary(found: Mapping[str, Sequence[tuple[Answer, FinishedReport]]]) -> dict[str, Any]:
    """What both arms gave, and whether that is enough."""
    rates = {arm: _tokens_a_step([report for _, report in answered]) for arm, answered in found.items()}
    seconds = {
        arm: median(answer.token_times_s[-1] for answer, _ in answered) for arm, answered in found.items()
    }
    ratio, later = rates["shared"] / rates["full"], seconds["shared"] / seconds["full"]
    return {
        "passed": rates["full"] >= ENOUGH and ratio >= LEAST and later <= 1,
        "tokens_a_step": rates,
        "accepted_share_of_full": ratio,
        "share_interval": _interval(found),
        "answer_s": seconds,
        "answer_s_ratio": later,
        "num_computed": {
            arm: median(report.num_computed for _, report in answered) for arm, answered in found.items()
        },
    }


def _interval(found: Mapping[str, Sequence[tuple[Answer, FinishedReport]]]) -> dict[str, float]:
    """95 % of `accepted_share_of_full`: prompts are drawn with replacement."""
    reports = {arm: [report for _, report in answered] for arm, answered in found.items()}
    rng, count = np.random.default_rng(0), len(reports["full"])
    shares = []
    for _ in range(_BOOTSTRAPS):
        drawn = rng.integers(count, size=count)
        full, shared = (_tokens_a_step([reports[arm][place] for place in drawn]) for arm in _ARMS)
        shares.append(shared / full)
    low, high = np.quantile(shares, (0.025, 0.975))
    return {"low": float(low), "high": float(high)}


def _tokens_a_step(reports: Sequence[FinishedReport]) -> float:
    steps = sum(report.num_answer_steps for report in reports)
    return sum(report.num_answer_tokens for report in reports) / max(1, steps)
