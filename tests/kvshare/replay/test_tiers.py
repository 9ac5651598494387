"""A log through memory above a disk: what comes from where, and that no policy exceeds what there is."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tree import EVICTION_QUEUES, DeltaTree, Node, NodeId, SegmentId, TokenIds, token_ids
from kvshare.errors import ConfigError
from kvshare.replay.options import ReplayOptions
from kvshare.replay.policies import parse_policies
from kvshare.replay.policies.weightless import WeightlessKV, WeightlessSequence
from kvshare.replay.policies.weightless_stack import WeightlessStack
from kvshare.replay.tiers import Size, TierSizes, replay_tiers
from kvshare.settings import load_settings
from kvshare.sharing.memory_keeper import Computed, MemoryKeeper
from kvshare.sharing.plan import NoPlan

POLICIES = sorted(EVICTION_QUEUES)
HOST, DISK = 400, 900  # bytes, of which a token has one


@dataclass(eq=False)
class Store:
    """A keeper over tiers, whose prompts have tokens of their own."""

    policy: str

    def __post_init__(self) -> None:
        ids, ticks, nodes = (itertools.count(1) for _ in range(3))
        self.stack = WeightlessStack(HOST, DISK, EVICTION_QUEUES[self.policy]())
        tree = DeltaTree.open(
            None, identity=None, clock=lambda: float(next(ticks)), new_id=lambda: NodeId(next(nodes))
        )
        tree.evict_by(EVICTION_QUEUES[self.policy])
        self.keeper: MemoryKeeper[WeightlessKV] = MemoryKeeper(
            tree, self.stack, min_tokens=16, new_id=lambda: SegmentId(next(ids))
        )

    def put(self, number: int, length: int) -> Node | None:
        return self.keeper.store(Computed("n", _prompt(number, length), NoPlan(), WeightlessSequence(1)))

    def read(self, node: Node) -> None:
        assert not self.stack.fetch(node.pieces.segment_ids).missing
        self.keeper.tree.touch(node.node_id)

    def check(self) -> None:
        """Bytes within their limits, and counted as the tree counts them."""
        assert self.stack.num_bytes <= HOST
        assert self.stack.num_disk_bytes <= DISK
        assert self.stack.num_disk_bytes == self.keeper.tree.stats().num_bytes
        for node in self.keeper.tree.nodes():
            assert all(entry in self.stack for entry in node.pieces.segment_ids)


def _prompt(number: int, length: int) -> TokenIds:
    return token_ids(np.random.default_rng(number).integers(0, 30_000, length).astype(np.int32))


acts = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "read", "pin", "unpin"]),
        st.integers(0, 30),
        st.integers(16, 300),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(taken=acts)
def test_no_policy_exceeds_its_bytes_or_evicts_what_is_pinned(
    policy: str, taken: list[tuple[str, int, int]]
) -> None:
    store = Store(policy)
    pinned: set[NodeId] = set()
    for what, number, length in taken:
        nodes = store.keeper.tree.nodes()
        one = nodes[number % len(nodes)] if nodes else None
        if what == "put":
            store.put(number, length)
        elif one is not None and what == "read":
            store.read(one)
        elif one is not None and what == "pin" and len(pinned) < 2:
            store.keeper.tree.pin(one.node_id)
            pinned.add(one.node_id)
        elif what == "unpin" and pinned:
            store.keeper.tree.unpin(pinned.pop())
        store.check()
        assert pinned <= {node.node_id for node in store.keeper.tree.nodes()}


def test_what_left_memory_is_read_from_disk_once() -> None:
    """Then it is in memory again; what is evicted is in neither."""
    store = Store("lru")
    nodes = [store.put(number, 200) for number in range(4)]
    first, last = nodes[0], nodes[3]
    assert first is not None
    assert last is not None
    assert (store.stack.num_bytes, store.stack.num_disk_bytes, store.stack.num_written) == (400, 800, 800)
    store.read(last)
    assert store.stack.take_read() == frozenset()
    store.read(first)
    assert store.stack.take_read() == first.pieces.segment_ids
    store.read(first)
    assert store.stack.take_read() == frozenset()
    assert store.stack.num_read == 200
    store.put(9, 300)  # the second leaves
    assert store.keeper.tree.get(first.node_id) is not None
    assert store.keeper.tree.get(nodes[1].node_id) is None  # type: ignore[union-attr]  # it was stored
    store.check()


def _options(tmp_path: Path, prompts: list[str], arms: str = "kvshare-exact") -> ReplayOptions:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    return ReplayOptions(
        [log], tmp_path, parse_policies(arms), load_settings(), tokenizer="demo", bytes_per_token=1000
    )


def _text(number: int) -> str:
    return " ".join(f"word{number * 31 % 97} of{number} thing{place}" for place in range(60))


PROMPTS = [_text(number) for number in (0, 1, 2, 3, 0, 1, 2, 3, 3)]


def test_a_log_through_tiers(tmp_path: Path) -> None:
    """Four texts come again: all from memory; from memory and disk; and less where there is room for two."""
    sizes = [("100%", None), ("30%", "100%"), ("30%", "60%")]
    stacks = [TierSizes(_share(host), None if disk is None else _share(disk)) for host, disk in sizes]
    document = replay_tiers(_options(tmp_path, PROMPTS), stacks, ["lru", "copies"])
    assert json.loads((tmp_path / "tiers.json").read_text(encoding="utf-8")) == document
    (unlimited,) = document["unlimited"]
    assert unlimited["exact_tokens"] == unlimited["hit_tokens"] > 0
    whole, below, small = (document["stacks"][number] for number in (0, 2, 4))
    assert [one["eviction"] for one in document["stacks"]] == ["lru", "copies"] * 3
    assert whole["exact_share"] == whole["exact_share_of_host"] == 1.0
    assert whole["disk"] is None
    assert below["exact_share"] == 1.0
    assert below["exact_share_of_host"] < 0.5, "only the last text comes again at once"
    assert below["disk"]["bytes_read"] > 0
    assert below["evictions"] == {"whole": 0, "end": 0}
    assert small["exact_share"] < 1.0
    assert sum(small["evictions"].values()) > 0
    for one in document["stacks"]:
        tiers = [tier for tier in (one["host"], one["disk"]) if tier is not None]
        assert sum(tier["exact_tokens"] for tier in tiers) == one["exact_tokens"]
        assert sum(tier["hit_tokens"] for tier in tiers) == one["hit_tokens"]
        assert all(0 < tier["peak_bytes"] <= tier["max_bytes"] for tier in tiers)


def test_approximate_hits_are_told_apart(tmp_path: Path) -> None:
    """A text with another beginning is reused from its second word on, from disk, too."""
    changed = [f"other {prompt.split(' ', 1)[1]}" for prompt in PROMPTS[:3]]
    options = _options(tmp_path, [*PROMPTS[:4], *changed], "kvshare-fingerprints-open")
    document = replay_tiers(options, [TierSizes(_share("30%"), _share("100%"))], ["lru"])
    (one,) = document["stacks"]
    assert one["approximate_tokens"] > one["exact_tokens"]
    assert one["disk"]["hit_tokens"] > one["disk"]["exact_tokens"]
    assert one["hit_share"] == 1.0


def test_a_disk_that_is_smaller_than_memory_is_refused(tmp_path: Path) -> None:
    """Where one is a share, that is known when the log was read once."""
    stack = TierSizes(Size("1TiB", num_bytes=2**40), _share("10%"))
    with pytest.raises(ConfigError, match="disk:10% is less than host:1TiB"):
        replay_tiers(_options(tmp_path, PROMPTS[:2]), [stack], ["lru"])
    with pytest.raises(ConfigError, match="prefix has no tiers"):
        replay_tiers(_options(tmp_path, PROMPTS[:2], "prefix"), [stack], ["lru"])


def _share(text: str) -> Size:
    return Size(text, share=float(text[:-1]) / 100)
