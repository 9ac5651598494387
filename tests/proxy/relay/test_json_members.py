"""A body's members: found as Python's own parser finds them, cut out and added without touching the rest."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshare.errors import RequestError
from proxy.relay.json_members import read_members

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["a", "b", "kv", "\u00e9", 'quo"te', "{", ""])
bodies = st.dictionaries(names, values, max_size=6)


@settings(deadline=None)
@given(bodies, st.sampled_from([None, 0, 2]), st.booleans())
def test_what_is_not_touched_stays_as_it_was(body: object, indent: int | None, ascii_only: bool) -> None:
    """Read as json does, and written back to the very bytes."""
    try:
        raw = json.dumps(body, indent=indent, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    members = read_members(raw)
    assert members.document == json.loads(raw)
    assert members.spliced(without=(), added={}) == raw


@settings(deadline=None)
@given(bodies, st.sets(names), st.dictionaries(st.sampled_from(["x", "y"]), values, max_size=2))
def test_members_are_cut_and_added(
    body: dict[str, object], without: set[str], added: dict[str, object]
) -> None:
    """The result is JSON with exactly the members that should be there."""
    raw = json.dumps(body).encode()
    spliced = read_members(raw).spliced(without=without, added=added)
    expected = {name: value for name, value in body.items() if name not in without} | added
    assert json.loads(spliced) == expected


def test_every_one_of_equal_names_is_cut() -> None:
    """Also the one that is written in another way."""
    raw = b'{"a":1, "kv" : 2,"b":3,"\\u006bv":[{"kv":1}] }'
    assert read_members(raw).spliced(without={"kv"}, added={}) == b'{"a":1,"b":3 }'


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"3",
        b'"x"',
        b"{",
        b'{"a"}',
        b'{"a":}',
        b'{"a":1,}',
        b'{,"a":1}',
        b'{"a":1 "b":2}',
        b'{"a":1}}',
        b"{'a':1}",
        b'{1:"a"}',
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":"\xff"}',
        '{"a":1}'.encode("utf-16"),
        b'{"a":' + b"[" * 100_000,
        b'{"a":' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    """What cannot be read cannot be searched."""
    with pytest.raises(RequestError):
        read_members(raw)
