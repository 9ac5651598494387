"""Who leaves first, against a model that sorts everything anew for every question."""

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tree import Node, NodeId, PieceTable, token_ids
from delta_tree.eviction_order import EvictionOrder
from delta_tree.eviction_queue import CopiesQueue

NAMESPACES = ("a", "b", "c")


def node(node_id: int, namespace: str = "a", num_tokens: int = 10, *, pinned: bool = False) -> Node:
    """Only what the order looks at means anything."""
    return Node(
        node_id=NodeId(node_id),
        namespace=namespace,
        token_ids=token_ids([1] * num_tokens),
        pieces=PieceTable([]),
        exact_length=num_tokens,
        deviation=0.0,
        created_at=0.0,
        last_used_at=0.0,
        num_hits=0,
        pinned=pinned,
    )


@dataclass
class Model:
    """The same, slowly."""

    ranks: dict[int, tuple[float, int]] = field(default_factory=dict)
    namespace_of: dict[int, str] = field(default_factory=dict)
    num_copied: dict[int, float] = field(default_factory=dict)
    floors: dict[str | None, float] = field(default_factory=dict)
    clock: int = 0

    def put(self, one: Node) -> None:
        self.ranks.pop(one.node_id, None)
        if not one.pinned:
            self.clock += 1
            floor = max(self.floors.get(None, 0.0), self.floors.get(one.namespace, 0.0))
            worth = floor + 1.0 + self.num_copied.get(one.node_id, 0.0) / one.num_tokens
            self.ranks[one.node_id] = (worth, self.clock)
            self.namespace_of[one.node_id] = one.namespace

    def age(self, node_id: int, namespaces: list[str] | None) -> None:
        if node_id in self.ranks:
            for scope in [None] if namespaces is None else namespaces:
                self.floors[scope] = max(self.floors.get(scope, 0.0), self.ranks[node_id][0])

    def first(self, namespaces: list[str] | None, without: set[int]) -> int | None:
        able = [i for i in self.ranks if i not in without]
        able = [i for i in able if namespaces is None or self.namespace_of[i] in namespaces]
        return min(able, key=self.ranks.__getitem__, default=None)


ids = st.integers(1, 8)
scopes = st.one_of(st.none(), st.lists(st.sampled_from(NAMESPACES), max_size=3))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), ids, st.booleans()),
        st.tuples(st.just("copy"), ids, st.integers(1, 40)),
        st.tuples(st.just("remove"), ids, st.none()),
        st.tuples(st.just("shorten"), ids, st.none()),
        st.tuples(st.just("leave"), scopes, st.sets(ids, max_size=3)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_the_order_is_what_sorting_gives(taken: list[tuple[str, object, object]]) -> None:
    """Whatever is used, copied, pinned, shortened or evicted; each node has a namespace of its own."""
    order, model = EvictionOrder(), Model()
    nodes = {i: node(i, NAMESPACES[i % 3], num_tokens=10 * i) for i in range(1, 9)}
    for what, one, more in taken:
        if what == "leave":
            assert one is None or isinstance(one, list)
            assert isinstance(more, set)
            found = order.first(one, more)
            assert found == model.first(one, more)
            if found is not None:
                order.age(found, one)
                model.age(found, one)
            continue
        assert isinstance(one, int)
        if what == "put":
            order.record_use(replace(nodes[one], pinned=not more and one == 3))
            model.put(replace(nodes[one], pinned=not more and one == 3))
        elif what == "copy":
            assert isinstance(more, int)
            order.record_copies(NodeId(one), more)
            model.num_copied[one] = model.num_copied.get(one, 0.0) + more
        elif what == "shorten":
            shorter = node(one, nodes[one].namespace, max(1, nodes[one].num_tokens // 2))
            kept = shorter.num_tokens / nodes[one].num_tokens
            order.shorten(NodeId(one), kept)
            if one in model.num_copied:
                model.num_copied[one] *= kept
            nodes[one] = shorter
        else:
            order.remove(nodes[one])
            model.ranks.pop(one, None)
            model.num_copied.pop(one, None)
        for scope in (None, *([name] for name in NAMESPACES)):
            assert order.first(scope, ()) == model.first(scope, set())


def test_a_hit_after_the_other_takes_no_memory() -> None:
    """Stale entries are cleared away."""
    order = EvictionOrder()
    for _ in range(50):
        for number in range(1, 21):
            order.record_use(node(number))
    for queue in order._queues.values():
        assert isinstance(queue, CopiesQueue)
        assert len(queue._heap) <= 2 * 20 + 64 + 1
    assert order.first(None, ()) == 1
    for number in range(1, 21):
        order.remove(node(number))
    assert set(order._queues) == {None}
    assert not len(order._queues[None])


def test_room_of_one_replica_is_no_room_of_another() -> None:
    """An eviction ages the namespaces that share its room, and no others."""
    order = EvictionOrder()
    for number, namespace in ((1, "a"), (2, "b")):
        order.record_copies(NodeId(number), 100)
        order.record_use(node(number, namespace))
    order.age(NodeId(2), ["b"])
    order.record_use(node(3, "a"))
    order.record_use(node(4, "b"))
    assert order.first(["a"], ()) == 3
    assert order.first(["b"], ()) == 2


def test_namespaces_of_one_memory_are_one_order() -> None:
    """Also those that are new: they begin at the floor that evictions of others have raised."""
    order = EvictionOrder()
    order.record_copies(NodeId(1), 30)
    order.record_use(node(1, "a"))  # worth 4, known before its memory is
    for namespace in ("a", "b", "c"):
        order.put_into("memory", namespace)
    order.record_use(node(2, "b"))
    order.age(NodeId(1), ["memory"])
    order.record_use(node(3, "c"))
    leaving: list[NodeId] = []
    while (found := order.first(["memory"], leaving)) is not None:
        leaving.append(found)
    assert leaving == [2, 1, 3]
    assert order.first(["a"], ()) == 1  # and a namespace has its own
    assert order.first(None, ()) == 2


def test_a_namespace_is_in_several_groups() -> None:
    """Each has its own order: what leaves first in one may not be in the other."""
    order = EvictionOrder()
    for number, namespace in ((1, "a"), (2, "b"), (3, "c")):
        order.record_use(node(number, namespace))
    assert [order.put_into(group, "b") for group in ("memory", "tenant", "memory")] == [True, True, False]
    order.put_into("tenant", "a")
    order.put_into("memory", "c")
    assert (order.groups_of("b"), order.groups_of("d")) == (("memory", "tenant"), ())
    assert order.first(["memory"], ()) == 2
    assert order.first(["tenant"], ()) == 1
    order.record_use(node(2, "b"))
    assert order.first(["memory"], ()) == 3


def test_an_emptied_namespace_leaves_nothing() -> None:
    """Clients may name any number of them."""
    order = EvictionOrder()
    for number in range(100):
        one = node(number, f"namespace {number}")
        if number % 2:
            order.put_into("memory", one.namespace)
        order.record_use(one)
        order.age(one.node_id, [one.namespace])
        order.remove(one)
        order.forget(one.namespace)
    assert set(order._queues) == {None}
    assert not len(order._queues[None])
    assert not order._groups_of
    assert not order._floors
