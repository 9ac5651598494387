"""What a device costs: the constants of a profile, each with the measurement that it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

import yaml

from kvshare.errors import ConfigError

_FOLDER = resources.files(__package__) / "profiles"


@dataclass(frozen=True, slots=True)
class Model:
    """The model, and how vLLM was started with it."""

    num_layers: int
    num_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    kv_bytes: int
    cache_tokens: int
    step_tokens: int
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        """Of KV in bfloat16."""
        return self.num_layers * 2 * self.num_heads * self.head_dim * 2


@dataclass(frozen=True, slots=True)
class Costs:
    """Rates and fixed costs; some profiles lack those with a default. Units: seconds, bytes and tokens."""

    front_s: float
    prefill_tokens_per_s: float
    prefill_s_per_token2: float
    decode_s: float
    pass_s: float
    pass_tokens_per_s: float
    find_s: float
    find_s_per_token: float
    plan_s: float
    plan_s_per_token: float
    embed_s: float
    store_s: float
    pcie_bytes_per_s: float
    pageable_bytes_per_s: float
    memory_bytes_per_s: float
    check_bytes_per_s: float
    launch_s: float
    call_s: float
    behind_s: float
    front_s_per_token: float = 0.0  # of a prompt, in vLLM's front end and its engine's input
    scheduled_block_s: float = 0.0  # of a load's blocks, when it is scheduled
    source_block_s: float = 0.0  # of vLLM's blocks that a load copies from, in addition
    empty_step_s: float = 50e-6  # a step without a forward pass
    stored_piece_s: float = 0.0  # of the host, for each piece of host memory that a load reads
    blocks_launch_s: float = 0.0  # of the host, before each launch that copies between blocks
    graph_rows: float = 0.0  # of the largest piecewise CUDA graph that passes may use
    choose_s: float = 0.0  # of the host, for each token of a prompt whose repairs are chosen by scores

    def step_s(self, parts: Iterable[tuple[int, int]], *, bytes_per_token: int) -> float:
        """
        A forward pass of vLLM. Each part: a request's tokens computed before it, and after it.

        The weights are read once, however few the tokens. Attention costs operations where many tokens of a
        prompt are computed, and the bytes of the context where few are.
        """
        parts = list(parts)
        num_tokens = sum(after - before for before, after in parts)
        attending = (
            max(
                self.attention_s(before, after),
                after * bytes_per_token / self.memory_bytes_per_s,
            )
            for before, after in parts
        )
        return max(self.decode_s, num_tokens / self.prefill_tokens_per_s) + sum(attending)

    def attention_s(self, before: int, after: int) -> float:
        """The attention of a prompt's tokens from one place to another."""
        return (after * after - before * before) * self.prefill_s_per_token2

    def placeholders_s(self, num_tokens: int, *, busy_s: float = 0.0) -> float:
        """
        A pass over so many placeholders. `busy_s`: for how long the device has other work when the pass is
        launched.

        Its fixed cost was measured on an idle device. Beyond that of a step of decoding, in which the weights
        are read once from a graph, it is what the device waits for launches.
        """
        launching_s = self.pass_s - self.decode_s
        return self.pass_s - min(launching_s, busy_s) + num_tokens / self.pass_tokens_per_s

    def graph_pass_s(self, num_tokens: int, *, attending_s: float) -> float:
        """
        A pass over placeholders by the graphs that vLLM's own steps of as many tokens use: it takes as long.

        The weights are read once; launches take the device no time, as they are part of what was measured.
        """
        return max(self.decode_s, num_tokens / self.prefill_tokens_per_s) + attending_s

    def fronts_s(self, num_tokens: int) -> float:
        """What comes before the engine, for a prompt of so many tokens."""
        return self.front_s + num_tokens * self.front_s_per_token

    def search_s(self, num_tokens: int) -> float:
        """What the proxy's search for donors takes, for a prompt of so many tokens."""
        return self.find_s + num_tokens * self.find_s_per_token

    def planning_s(self, num_tokens: int) -> float:
        """What planning takes more, where there is a donor."""
        return self.plan_s + num_tokens * self.plan_s_per_token


@dataclass(frozen=True, slots=True)
class Profile:
    """`sources`: where each constant comes from."""

    name: str
    device: str
    model: Model
    costs: Costs
    sources: dict[str, str]


def names() -> list[str]:
    """Of the profiles that there are."""
    files = (entry.name.removesuffix(".yaml") for entry in _FOLDER.iterdir() if entry.name.endswith(".yaml"))
    return sorted(name for name in files if not name.endswith("-measured"))


def read_profile(name: str) -> Profile:
    """
    A profile may be based on another one, of which it replaces some constants and adds others.

    Raises ConfigError for a name that is none of `names`.
    """
    if name not in names():
        raise ConfigError("--profile", f"expected one of {', '.join(names())}, got {name!r}")
    document = _document(name)
    model, costs = document["model"], document["costs"]
    return Profile(
        document["name"],
        document["device"],
        Model(**{field.name: model[field.name]["value"] for field in fields(Model)}),
        Costs(**{name: row["value"] for name, row in costs.items()}),
        {constant: row["from"] for constant, row in {**model, **costs}.items()},
    )


def _document(name: str) -> dict[str, Any]:
    own: dict[str, Any] = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    if (base := own.get("based_on")) is None:
        return own
    found = _document(base)
    parts = {part: {**found[part], **own.get(part, {})} for part in ("model", "costs")}
    return {**found, **own, **parts}
