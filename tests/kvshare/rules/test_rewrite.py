"""What rules do to prompts: what they must never lose, and how they stay within their roles."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare.rules.rewrite import Rewritten, apply_rules
from kvshare.rules.texts import CHAT, shape_of, texts_of
from kvshare.settings import RuleSettings, load_settings
from kvshare.settings.patterns import MAX_LINE

NONCE = {"name": "nonce", "match": "cch=[0-9a-f]+", "action": "pin", "value": "cch=0"}
CLOCK = {"name": "clock", "match": r"^Now: \d+$", "action": "move"}


Rules = tuple[RuleSettings, ...]


def rules(*entries: dict[str, Any]) -> tuple[RuleSettings, ...]:
    """As the settings would have them."""
    settings = load_settings(overrides={"rules": list(entries)})
    return settings.rules


def chat(*messages: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def contents(found: Rewritten) -> list[Any]:
    return [message["content"] for message in found.body["messages"]]


# Lines that rules act on, lines that they do not, and all kinds of ends between them.
_lines = st.sampled_from(
    ["", "text", "cch=1f; more cch=22", "cch=0", "Now: 7", "Now: 12", "not Now: 7", "é\r"]
)
_texts = st.lists(_lines, max_size=5).map("\n".join)
_contents = _texts | st.lists(_texts.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3)
_roles = st.sampled_from(["system", "user", "assistant", "tool"])
_chats = st.lists(st.tuples(_roles, _contents), max_size=6).map(lambda messages: chat(*messages))
_rules = st.lists(
    st.builds(
        lambda base, roles, first: {**base, "in": roles, "first": first},
        st.sampled_from([NONCE, CLOCK]),
        st.lists(st.sampled_from(["system", "user", "tool"]), min_size=1, max_size=3),
        st.booleans(),
    ),
    max_size=3,
).map(lambda entries: rules(*({**entry, "name": f"r{number}"} for number, entry in enumerate(entries))))


def lines_of(body: dict[str, Any]) -> Counter[str]:
    """Every line with something on it, of all messages."""
    everything = chat(*((("user", message["content"])) for message in body["messages"]))
    return Counter(line for text in texts_of(everything, CHAT) for line in text.text.split("\n") if line)


@given(_chats, st.booleans())
def test_move_keeps_every_line(body: dict[str, Any], first: bool) -> None:
    """Nothing is lost, nothing is there twice, and all else stays in its order."""
    found = apply_rules(rules({**CLOCK, "first": first, "in": ["system", "user", "tool"]}), body, CHAT)
    assert lines_of(found.body) == lines_of(body)
    if not first and any(role in ("user", "tool") for role in roles_of(body)):
        stays = [line for line in all_lines(body) if not line.startswith("Now: ")]
        assert [line for line in all_lines(found.body) if not line.startswith("Now: ")] == stays


def roles_of(body: dict[str, Any]) -> list[str]:
    return [message["role"] for message in body["messages"]]


def all_lines(body: dict[str, Any]) -> list[str]:
    everything = chat(*((("user", message["content"])) for message in body["messages"]))
    return [line for text in texts_of(everything, CHAT) for line in text.text.split("\n") if line]


@given(_chats, _rules)
def test_rules_change_nothing_but_texts_of_their_roles(body: dict[str, Any], acting: Rules) -> None:
    """The body that was given stays; the model's words and messages of other roles do, but for the end."""
    before = copy.deepcopy(body)
    found = apply_rules(acting, body, CHAT)
    assert body == before
    assert (found.body is body) == (not found.rules)
    roles = {role for rule in acting if rule.name in found.rules for role in rule.roles}
    last = max((n for n, role in enumerate(roles_of(body)) if role in ("user", "tool")), default=-1)
    assert roles_of(found.body) == roles_of(body)
    for number, (old, new) in enumerate(zip(body["messages"], found.body["messages"], strict=True)):
        if old["role"] not in roles and number != last:
            assert new == old


@given(_chats, _rules)
def test_rules_that_have_acted_leave_nothing_to_do(body: dict[str, Any], acting: Rules) -> None:
    """Each alone: what it pinned is pinned, what it moved is at the end. Of `first` a second line is left."""
    for rule in acting:
        if not rule.first:
            once = apply_rules([rule], body, CHAT)
            assert apply_rules([rule], once.body, CHAT) == Rewritten(once.body, ())


def test_a_pin_replaces_each_match_by_its_value() -> None:
    """Of all lines; a `\\1` in the value is text, not a group."""
    literal = {**NONCE, "match": "cch=([0-9a-f]+)", "value": r"cch=\1"}
    body = chat(("system", "a cch=12; cch=34;\r\nb\ncch=56"), ("user", "cch=78"))
    found = apply_rules(rules(literal), body, CHAT)
    assert contents(found) == ["a cch=\\1; cch=\\1;\r\nb\ncch=\\1", "cch=\\1"]
    assert found.rules == ("nonce",)


def test_only_the_first_line_of_the_prompt_where_that_is_asked_for() -> None:
    """What a user has pasted further down stays."""
    body = chat(("system", "top\ncch=1 and cch=2\ncch=3"), ("user", "cch=4"))
    found = apply_rules(rules({**NONCE, "first": True}), body, CHAT)
    assert contents(found) == ["top\ncch=0 and cch=0\ncch=3", "cch=4"]


def test_a_moved_line_stands_behind_all_else() -> None:
    """In the last message, of a tool too: an agent's prompt grows there, and the rest stays equal."""
    history = [("user", "do it"), ("assistant", "calling"), ("tool", "result")]
    found = [
        apply_rules(rules(CLOCK), chat(("system", f"Be good.\nNow: {now}\nBe brief."), *history), CHAT)
        for now in (1, 2)
    ]
    assert contents(found[0]) == ["Be good.\nBe brief.", "do it", "calling", "result\nNow: 1"]
    assert contents(found[0])[:3] == contents(found[1])[:3]


def test_lines_end_as_windows_ends_them() -> None:
    r"""`$` matches in front of `\r\n`."""
    body = chat(("system", "a\r\nNow: 1\r\nb"), ("user", "u"))
    assert contents(apply_rules(rules(CLOCK), body, CHAT)) == ["a\r\nb", "u\nNow: 1\r"]


def test_without_a_place_to_go_nothing_moves() -> None:
    for path, body in (
        ("/v1/chat/completions", chat(("system", "Now: 1"))),
        ("/v1/completions", {"prompt": "Now: 1\nOnce upon a time"}),
    ):
        shape = shape_of(path)
        assert shape is not None
        assert apply_rules(rules(CLOCK), body, shape) == Rewritten(body, ())


def test_tools_only_where_a_rule_names_them() -> None:
    body = chat(("user", "u"), ("tool", "cch=1"))
    assert apply_rules(rules(NONCE), body, CHAT).rules == ()
    named = apply_rules(rules({**NONCE, "in": ["tool"]}), body, CHAT)
    assert contents(named) == ["u", "cch=0"]


def test_rules_act_in_their_order() -> None:
    """The second sees what the first left."""
    again = {**NONCE, "name": "again", "match": "cch=0", "value": "none"}
    assert contents(apply_rules(rules(NONCE, again), chat(("user", "cch=9")), CHAT)) == ["none"]
    found = apply_rules(rules(again, NONCE), chat(("user", "cch=9")), CHAT)
    assert (contents(found), found.rules) == (["cch=0"], ("nonce",))


@pytest.mark.parametrize(("length", "acts"), [(MAX_LINE, True), (MAX_LINE + 1, False)])
def test_long_lines_are_not_searched(length: int, acts: bool) -> None:
    line = "cch=1".rjust(length)
    assert bool(apply_rules(rules(NONCE), chat(("user", f"a\n{line}\nb")), CHAT).rules) is acts


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/v1/messages",
            {
                "system": [{"type": "text", "text": "Now: 1\ncch=2", "cache_control": {"type": "ephemeral"}}],
                "messages": [{"role": "user", "content": [{"type": "tool_result", "content": "t"}]}],
            },
            {
                "system": [{"type": "text", "text": "cch=0", "cache_control": {"type": "ephemeral"}}],
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "content": "t"},
                            {"type": "text", "text": "Now: 1"},
                        ],
                    }
                ],
            },
        ),
        (
            "/v1/responses",
            {"instructions": "Now: 1\ncch=2", "input": "u"},
            {"instructions": "cch=0", "input": "u\nNow: 1"},
        ),
        ("/v1/completions", {"prompt": ["cch=1", "b"]}, {"prompt": ["cch=0", "b"]}),
    ],
)
def test_every_api_is_rewritten(path: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    """What is not text stays as it is."""
    shape = shape_of(path)
    assert shape is not None
    assert apply_rules(rules(NONCE, CLOCK), body, shape).body == expected
