"""
`kvshare bench way`: where the time of a request goes besides the model, which has one layer.

Chats of a text, in turns, each a stream of one token. Of the first three vLLM has all but the end in its own
prefix cache:
    straight     to vLLM: HTTP, template, tokenizer, front end and one step
    given        the same with the tokens beside the text, which vLLM then does not render
    through      the same text through the proxy, which renders, plans and sends it; `added`: what that takes
    shared       an edited text through the proxy: by stage, from the proxy's and the connector's own clocks
and `render`, vLLM's /render of the text by itself, and `step`, one step of vLLM. `template` and `tokens`
are measured in this process.

    client -> body -> tokenize -> prefix, fingerprint, plan, fetch -> ticket -> engine -> first token
                      (render)    (or a wait)                                   (verify, write, pass; the
                                                                                rest is vLLM's own)
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvshare.demo import MODEL_PATH
from kvshare.errors import ConfigError
from kvshare_lab.bench.figures import percentiles
from kvshare_lab.vllm.servers import MODEL_NAME
from kvshare_lab.vllm.session import Session, run_benchmark
from kvshare_lab.vllm.stack import ALWAYS_SHARE, BenchConfig, StackOptions

_WARM_UP = 2
_STEPS = 32  # of vLLM after the first token, whose mean is `step`
_HEADER = 64  # tokens of the template, at most
_ROOM = 256  # tokens of context beyond the longest prompt
_INSIDE = ("verify", "write", "pass")  # stages of the connector before the first token
_NOT_STAGES = ("total", "first_token")


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    lengths: str = "4096,16384,30000"
    changed: float = 0.01
    edits: int = 5
    repeats: int = 20
    eager: bool = True

    @property
    def own_model(self) -> str:
        return "slim"

    @property
    def sizes(self) -> list[int]:
        """Raises ConfigError."""
        try:
            return sorted(int(each) for each in self.lengths.split(","))
        except ValueError as exc:
            raise ConfigError("--lengths", f"expected numbers with commas, got {self.lengths!r}") from exc

    @property
    def options(self) -> StackOptions:
        longest = max(self.sizes) + _ROOM
        vllm = replace(self.vllm, max_model_len=longest, max_num_batched_tokens=8192, kv_cache_gib=1)
        return replace(self.stack_of(vllm), proxy_settings=ALWAYS_SHARE)


class Texts:
    """Texts of about so many tokens, and edited ones. `tokenizer`: that of the benchmarks' models."""

    def __init__(self, rng: np.random.Generator, config: Config) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MODEL_PATH)
        self._rng, self._config = rng, config
        sample = self._words(2000)
        self._tokens_per_word = len(self.tokenizer(" ".join(sample))["input_ids"]) / len(sample)

    def unrelated(self, num_tokens: int) -> list[str]:
        return self._words(int((num_tokens - _HEADER) / self._tokens_per_word))

    def edited(self, words: Sequence[str]) -> list[str]:
        """With as many words replaced, in evenly spread stretches of slightly other places each time."""
        changed, edits = list(words), self._config.edits
        length = max(1, round(self._config.changed * len(words) / edits))
        distance = len(words) // edits
        for number in range(edits):
            start = number * distance + int(self._rng.integers(1, max(2, distance - length)))
            changed[start : start + length] = self._words(length)
        return changed

    def _words(self, count: int) -> list[str]:
        return [f"{value:x}" for value in self._rng.integers(0, 2**20, count)]


async def measure(bench: Session[Config]) -> dict[str, Any]:
    """Milliseconds of each arm and stage, by length."""
    texts = Texts(bench.rng, bench.config)
    found = {str(length): await _Length(bench, texts, length).measured() for length in bench.config.sizes}
    return {"lengths": found, "decisions": bench.watch.decisions}


class _Length:
    """The measurements of one length."""

    def __init__(self, bench: Session[Config], texts: Texts, length: int) -> None:
        self._bench, self._texts = bench, texts
        self._donor = texts.unrelated(length)
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)  # by arm
        self._stages: defaultdict[str, list[float]] = defaultdict(list)  # seconds of `shared`

    async def measured(self) -> dict[str, Any]:
        bench, text = self._bench, " ".join(self._donor)
        await bench.proxy.chat(text)
        await bench.settle()
        rendered = await self._render(text)
        for number in range(bench.config.repeats + _WARM_UP):
            if number == _WARM_UP:
                self._seconds.clear()
                self._stages.clear()
            await self._repeat(text, rendered)
        return {
            "tokens": len(rendered),
            "bytes": len(text),
            "arms": _percentiles(self._seconds),
            "stages": _percentiles(self._stages),
        }

    async def _repeat(self, text: str, rendered: Sequence[int]) -> None:
        bench, seconds = self._bench, self._seconds
        given = {"kv_transfer_params": {"prompt_token_ids": list(rendered)}}
        straight = await bench.shared.chat(text, max_tokens=_STEPS + 1)
        seconds["straight"].append(straight.ttft_s)
        seconds["step"].append((straight.token_times_s[-1] - straight.ttft_s) / _STEPS)
        seconds["given"].append((await bench.shared.chat(text, extra=given)).ttft_s)
        through = await bench.proxy.chat(text, extra={"kvshare": {"mode": "exact", "no_store": True}})
        seconds["through"].append(through.ttft_s)
        seconds["added"].append(through.ttft_s - straight.ttft_s)
        began = time.perf_counter()
        await self._render(text)
        seconds["render"].append(time.perf_counter() - began)
        self._tokenize(text)
        await self._share(" ".join(self._texts.edited(self._donor)))

    async def _share(self, text: str) -> None:
        bench, stages = self._bench, self._stages
        await bench.settle()
        answer = await bench.proxy.chat(text)
        await bench.settle()
        document = json.loads(
            await bench.proxy.fetch(f"/admin/requests/{answer.headers['X-KVShare-Request']}")
        )
        own, inside = document["seconds"], document["executed"]["seconds"]
        for name, value in own.items():
            if name not in _NOT_STAGES:
                stages[name].append(value)
        for name in _INSIDE:
            stages[f"vllm_{name}"].append(inside.get(name, 0.0))
        passed = [value for name, value in own.items() if name not in _NOT_STAGES]
        stages["vllm_rest"].append(own["engine"] - sum(inside.get(name, 0.0) for name in _INSIDE))
        stages["between"].append(own["first_token"] - sum(passed))
        stages["client"].append(answer.ttft_s - own["first_token"])
        self._seconds["shared"].append(answer.ttft_s)
        await bench.watch.look()

    async def _render(self, text: str) -> Sequence[int]:
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": text}]}
        document = json.loads(await self._bench.shared.fetch("/v1/chat/completions/render", body))
        found: Sequence[int] = document["token_ids"]
        return found

    def _tokenize(self, text: str) -> None:
        """Template and tokenizer by themselves, as vLLM calls them."""
        tokenizer, began = self._texts.tokenizer, time.perf_counter()
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        applied = time.perf_counter()
        tokenizer(prompt, add_special_tokens=False)
        self._seconds["template"].append(applied - began)
        self._seconds["tokens"].append(time.perf_counter() - applied)


def _percentiles(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """With the least, which other work on the machine disturbs least."""
    return {
        name: {"min_ms": round(1e3 * min(values), 3), **percentiles(values)}
        for name, values in seconds.items()
    }


run = partial(run_benchmark, "way", measure)
