"""Which arguments of questions and commands are refused, and how."""

from __future__ import annotations

import pytest

from delta_tree import DeltaTree
from kvshare.errors import RequestError
from tests.kvshare.admin.documents import document_of
from tests.kvshare.cli.family import OURS, Family


@pytest.mark.parametrize(
    ("what", "arguments", "param"),
    [
        ("stats", {"namespace": "aaaaaaa0"}, "namespace"),
        ("stats", {"namespace": "a"}, "namespace"),
        ("stats", {"tenant": "acme"}, "tenant"),
        ("tree", {"depth": "0"}, "depth"),
        ("tree", {"depth": "1000"}, "depth"),
        ("tree", {"sort": "colour"}, "sort"),
        ("tree", {"root": "12"}, "root"),
        ("node", {}, "id"),
        ("node", {"id": "one"}, "id"),
        ("node", {"id": True}, "id"),
        ("node", {"id": "1_0"}, "id"),
        ("node", {"id": " 5"}, "id"),
        ("node", {"id": "9" * 500}, "id"),
        ("diff", {"a": "12", "b": "13"}, "a"),
        ("evict", {}, "node"),
        ("evict", {"all": "false"}, "node"),
        ("evict", {"all": "true", "namespace": OURS}, "node"),
        ("evict", {"all": "perhaps"}, "all"),
        ("evict", {"all": "yes"}, "all"),
        ("evict", {"namespace": OURS, "dryrun": "true"}, "dryrun"),
        ("evict", {"namespace": ""}, "namespace"),
        ("pin", {}, "node"),
        ("pin", {"node": "12", "namespace": OURS}, "node"),
        ("pin", {"node": "12"}, "node"),
        ("pin", {"all": True}, "all"),
        ("unpin", {}, "node"),
        ("unpin", {"node": "12", "all": True}, "node"),
        ("unpin", {"namespace": "cccc"}, "namespace"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(
    store: DeltaTree, family: Family, what: str, arguments: dict[str, object], param: str
) -> None:
    """The message begins with the argument, the error carries it, and nothing has changed."""
    with pytest.raises(RequestError, match=f"^{param}: ") as refused:
        document_of(store, what, arguments)
    assert refused.value.param == param
    assert len(store.nodes()) == 4


def test_a_node_that_is_not_there_has_a_code(store: DeltaTree, family: Family) -> None:
    """By which scripts tell it from a wrong argument."""
    for what, name in (("node", "id"), ("tree", "root"), ("evict", "node"), ("pin", "node")):
        with pytest.raises(RequestError) as refused:
            document_of(store, what, {name: 12_345})
        assert (refused.value.code, refused.value.param) == ("node_not_found", name)
