"""Groups of namespaces, while prompts come and go: the tree's own machine, and namespaces put into groups."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from tests.delta_tree.test_tree_machine import NAMESPACES, TreeMachine

GROUPS = ("memory", "tenant")


class GroupMachine(TreeMachine):
    """Beside it a set of pairs: which group has which namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: set[tuple[str, str]] = set()

    @rule(namespace=st.sampled_from(NAMESPACES), group=st.sampled_from(GROUPS))
    def put_into(self, namespace: str, group: str) -> None:
        """A namespace is in a group from then on, until it has no prompts."""
        self.tree.put_into(group, namespace)
        if self.tree.stats(namespace).num_nodes:
            self.groups.add((group, namespace))

    @rule()
    def reopen(self) -> None:
        """Groups are not stored."""
        super().reopen()
        self.groups.clear()

    @invariant()
    def groups_add_up(self) -> None:
        """What a group has, and which of its prompts leaves first, is that of its namespaces."""
        self.groups = {each for each in self.groups if self.tree.stats(each[1]).num_nodes}
        for group in GROUPS:
            namespaces = [namespace for of, namespace in self.groups if of == group]
            num_bytes = sum(self.tree.stats(namespace).num_bytes for namespace in namespaces)
            assert self.tree.bytes_of(group) == num_bytes
            assert self.tree.bytes_of_groups().get(group, 0) == num_bytes
            first = self.tree.next_to_evict([group])
            assert first is (self.tree.next_to_evict(namespaces) if namespaces else None)


TestGroups = GroupMachine.TestCase
TestGroups.__doc__ = "Bytes and the order of eviction of groups are those of their namespaces."
TestGroups.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
