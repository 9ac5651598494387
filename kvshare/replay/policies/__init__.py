"""
The cache policies by name, and how a name with options becomes one: `kvshare-open:min_run=32`.

    nothing                      no cache
    prefix                       vLLM's prefix cache: an equal prefix, in blocks of 16 tokens
    chunks                       LMCache's blend: the prefix, then chunks of 256 tokens at any position
    response                     GPTCache: the stored answer to the most similar prompt              embeds
    kvshare                      as config.yaml says: prefixes, fingerprints, embeddings             embeds
    kvshare-open                 the same without thresholds and without repair                      embeds
    kvshare-exact                the same for requests that allow nothing approximate: equal prefixes
    kvshare-fingerprints[-open]  without the search by embedding
    kvshare-semantic[-open]      only the search by embedding                                        embeds
    oracle                       every run of 16 tokens that an earlier prompt had
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from kvshare.errors import ConfigError
from kvshare.replay.policies.base import CachePolicy, NothingPolicy, PolicyContext
from kvshare.replay.policies.exact import ChunksPolicy, PrefixPolicy
from kvshare.replay.policies.oracle import OraclePolicy
from kvshare.replay.policies.response import ResponsePolicy
from kvshare.replay.policies.sharing import SharingPolicy
from kvshare.replay.policies.sharing_options import SharingOptions

Number = int | float

_KVSHARE: Final = {
    "kvshare": SharingOptions(),
    "kvshare-open": SharingOptions(open_gates=True),
    "kvshare-exact": SharingOptions(nominate="prefix"),
    "kvshare-fingerprints": SharingOptions(nominate="fingerprints"),
    "kvshare-fingerprints-open": SharingOptions(nominate="fingerprints", open_gates=True),
    "kvshare-semantic": SharingOptions(nominate="embedding"),
    "kvshare-semantic-open": SharingOptions(nominate="embedding", open_gates=True),
}
_OTHERS: Final[dict[str, type[CachePolicy]]] = {
    policy.family: policy
    for policy in (NothingPolicy, PrefixPolicy, ChunksPolicy, ResponsePolicy, OraclePolicy)
}
_ALIASES: Final[Mapping[str, Sequence[str]]] = {
    # none of these embeds
    "fast": ("nothing", "prefix", "chunks", "kvshare-fingerprints", "kvshare-fingerprints-open", "oracle"),
    "all": (
        *("nothing", "prefix", "chunks", "response", "kvshare", "kvshare-open"),
        *("kvshare-open:max_distance=0.15", "kvshare-fingerprints", "kvshare-fingerprints-open"),
        *("kvshare-semantic", "kvshare-semantic-open", "kvshare-semantic-open:max_distance=0.15", "oracle"),
    ),
}
_EXPECTED: Final = ", ".join((*_OTHERS, *_KVSHARE, *_ALIASES))


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy as given on the command line; `text` is its name in the results."""

    text: str
    name: str
    options: dict[str, Number] = field(default_factory=dict)

    @property
    def is_kvshare(self) -> bool:
        return self.name in _KVSHARE

    @property
    def embeds(self) -> bool:
        sharing = _KVSHARE.get(self.name)
        return self.name == "response" if sharing is None else sharing.uses_embedding


def parse_policies(text: str) -> tuple[PolicySpec, ...]:
    """
    Return the policies of a comma-separated list, each once, in its order; `fast` and `all` stand for
    several.

    Raises:  ConfigError for an unknown policy or option, or a value that is not a number
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    wanted = [spec for name in names for spec in _ALIASES.get(name, [name])]
    if not wanted:
        raise ConfigError("--arms", f"expected some of: {_EXPECTED}")
    return tuple(_parse(spec) for spec in dict.fromkeys(wanted))


def make_policy(
    spec: PolicySpec, context: PolicyContext, capacity_tokens: int | None = None, **tiers: Any
) -> CachePolicy:
    """
    Return the policy with a store of its own; capacity None: infinite. The caller closes it.

    `tiers`: for those of kvshare, `stack` and `eviction` of a `SharingPolicy`
    """
    if spec.name in _KVSHARE:
        options = replace(_KVSHARE[spec.name], **spec.options)  # type: ignore[arg-type]  # checked by _parse
        return SharingPolicy(spec.text, context, capacity_tokens, sharing_options=options, **tiers)
    return _OTHERS[spec.name](spec.text, context, capacity_tokens, **spec.options)


@contextmanager
def open_policies(
    specs: Iterable[PolicySpec], context: PolicyContext, capacities_tokens: Sequence[int | None] = (None,)
) -> Iterator[list[CachePolicy]]:
    """The policies, each with a store of each capacity, closed at the end; `nothing` only with the first."""
    with ExitStack() as stack:
        policies = []
        for spec in specs:
            for capacity in capacities_tokens[:1] if spec.name == "nothing" else capacities_tokens:
                policies.append(make_policy(spec, context, capacity))
                stack.callback(policies[-1].close)
        yield policies


def _parse(text: str) -> PolicySpec:
    name, *parts = text.split(":")
    if name not in _OTHERS and name not in _KVSHARE:
        raise ConfigError("--arms", f"unknown policy {name!r}; expected some of: {_EXPECTED}")
    if name in _KVSHARE:
        numbers = [each for each in fields(SharingOptions) if each.default is None]
    else:
        numbers = [each for each in fields(_OTHERS[name]) if each.kw_only]
    types: dict[str, type[Number]] = {
        each.name: float if "float" in str(each.type) else int for each in numbers
    }
    options: dict[str, Number] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if key not in types:
            offered = ", ".join(types) or "none"
            raise ConfigError("--arms", f"{name} has no option {key!r}; its options: {offered}")
        try:
            options[key] = types[key](value)
        except ValueError as exc:
            raise ConfigError("--arms", f"{name}:{key}: expected a number, got {value!r}") from exc
        if options[key] < 0 or (types[key] is int and options[key] < 1):
            raise ConfigError("--arms", f"{name}:{key}: {value} is too small")
    return PolicySpec(text, name, options)
