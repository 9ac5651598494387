"""
The arms by name, and how a name with options becomes one: `kvshare-open:min_run=32:max_candidates=64`.

    nothing                      no cache
    prefix                       vLLM: equal prefix, blocks of 16
    chunks                       LMCache's blend: prefix, then chunks of 256 anywhere
    response                     GPTCache: the answer to the nearest prompt                          embeds
    kvshare                      as config.yaml says: prefix, fingerprints, meaning                  embeds
    kvshare-open                 the same with all gates open and nothing repaired                   embeds
    kvshare-fingerprints[-open]  without meaning
    kvshare-semantic[-open]      by meaning alone                                                    embeds
    oracle                       every stretch of 16 tokens seen before
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Final

from kvshare.errors import ConfigError
from kvshare.replay.arms.base import Arm, Meanings, NothingArm, Workbench
from kvshare.replay.arms.exact import ChunksArm, PrefixArm
from kvshare.replay.arms.oracle import OracleArm
from kvshare.replay.arms.response import ResponseArm
from kvshare.replay.arms.sharing import SharingArm
from kvshare.replay.arms.sharing_options import SharingOptions

Number = int | float
Options = dict[str, Number]

_KVSHARE: Final = {
    "kvshare": SharingOptions(),
    "kvshare-open": SharingOptions(open_gates=True),
    "kvshare-fingerprints": SharingOptions("fingerprints"),
    "kvshare-fingerprints-open": SharingOptions("fingerprints", open_gates=True),
    "kvshare-semantic": SharingOptions("meaning"),
    "kvshare-semantic-open": SharingOptions("meaning", open_gates=True),
}
_ARMS: Final[dict[str, type[Arm]]] = {
    "nothing": NothingArm,
    "prefix": PrefixArm,
    "chunks": ChunksArm,
    "response": ResponseArm,
    "oracle": OracleArm,
}
_ALIASES: Final = {
    "fast": "nothing,prefix,chunks,kvshare-fingerprints,kvshare-fingerprints-open,oracle",  # none embeds
    "all": "nothing,prefix,chunks,response,kvshare,kvshare-open,kvshare-open:max_distance=0.15,"
    "kvshare-fingerprints,kvshare-fingerprints-open,kvshare-semantic,kvshare-semantic-open,"
    "kvshare-semantic-open:max_distance=0.15,oracle",
}
_EXPECTED: Final = ", ".join((*_ARMS, *_KVSHARE, *_ALIASES))


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """An arm as asked for on the command line; `text` is what results call it."""

    text: str
    name: str
    options: Options = field(default_factory=dict)

    @property
    def embeds(self) -> bool:
        """Whether it needs the requests' embeddings."""
        if self.name in _KVSHARE:
            return _KVSHARE[self.name].uses_meaning
        return self.name == "response"


def parse_arms(text: str) -> tuple[ArmSpec, ...]:
    """
    The arms of a comma-separated list; `fast` and `all` stand for several. Each once, in their order.

    Raises:  ConfigError for an unknown arm or option, or a value that is no number
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    wanted = [spec for name in names for spec in _ALIASES.get(name, name).split(",")]
    if not wanted:
        raise ConfigError("--arms", f"expected some of: {_EXPECTED}")
    return tuple(_parse(spec) for spec in dict.fromkeys(wanted))


def make_arm(spec: ArmSpec, bench: Workbench, capacity_tokens: int | None = None) -> Arm:
    """The arm with a store of its own; None: an infinite one. The caller closes it."""
    if spec.name in _KVSHARE:
        sharing = replace(_KVSHARE[spec.name], **spec.options)  # type: ignore[arg-type]  # checked by _parse
        return SharingArm(spec.text, bench, capacity_tokens, sharing=sharing)
    return _ARMS[spec.name](spec.text, bench, capacity_tokens, **spec.options)


@contextmanager
def opened_arms(stores: Iterable[tuple[ArmSpec, int | None]], bench: Workbench) -> Iterator[list[Arm]]:
    """The arms, each with a store of its own, closed at the end."""
    with ExitStack() as stack:
        arms = []
        for spec, capacity_tokens in stores:
            arms.append(make_arm(spec, bench, capacity_tokens))
            stack.callback(arms[-1].close)
        yield arms


def _parse(text: str) -> ArmSpec:
    name, *parts = text.split(":")
    if name not in _ARMS and name not in _KVSHARE:
        raise ConfigError("--arms", f"unknown arm {name!r}; expected some of: {_EXPECTED}")
    known, options = _numbers_of(name), Options()
    for part in parts:
        key, _, value = part.partition("=")
        kind = known.get(key)
        if kind is None:
            offered = ", ".join(known) or "none"
            raise ConfigError("--arms", f"{name} has no option {key!r}; it has: {offered}")
        try:
            options[key] = kind(value)
        except ValueError as exc:
            raise ConfigError("--arms", f"{name}:{key} expected a number, got {value!r}") from exc
        if options[key] < 0 or (kind is int and options[key] < 1):
            raise ConfigError("--arms", f"{name}:{key} is too small: {value}")
    return ArmSpec(text, name, options)


def _numbers_of(name: str) -> dict[str, type[Number]]:
    """The options that an arm takes, as `SharingOptions` or the arm declares them."""
    if name in _KVSHARE:
        numbers = [each for each in fields(SharingOptions) if each.default is None]
    else:
        numbers = [each for each in fields(_ARMS[name]) if each.kw_only]
    return {each.name: float if str(each.type).startswith("float") else int for each in numbers}


__all__ = ["Arm", "ArmSpec", "Meanings", "Workbench", "make_arm", "opened_arms", "parse_arms"]
