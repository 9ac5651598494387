"""Workloads from their samples: repeatable, readable, and of the shape that each promises."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from kvshare.errors import LogError
from kvshare.replay.workloads import WORKLOADS, WorkloadRow, generate, write_rows
from kvshare.replay.workloads.chats import kept
from tests.kvshare.logs import logs

NUM = 120


def _rows(name: str, seed: int = 1, sources: tuple[Path, ...] = ()) -> list[WorkloadRow]:
    return list(generate(name, sources, num_requests=NUM, seed=seed))


def _texts(rows: list[WorkloadRow]) -> list[str]:
    return ["\n".join(message["content"] for message in row.messages) for row in rows]


def _common_prefix(a: str, b: str) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _pieces(text: str) -> set[str]:
    """Stretches of words, wherever they stand."""
    words = text.split()
    return {" ".join(words[n : n + 8]) for n in range(len(words) - 7)}


def _covered(text: str, earlier: set[str]) -> float:
    pieces = _pieces(text)
    return len(pieces & earlier) / max(1, len(pieces))


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_seeds_give_equal_files(tmp_path: Path, name: str) -> None:
    """Compressed as well; another seed gives another file."""
    paths = [tmp_path / "a.gz", tmp_path / "b.gz", tmp_path / "c.gz"]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        assert write_rows(_rows(name, seed), path) == NUM
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes() != paths[2].read_bytes()


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_plain_reader_takes_every_row(tmp_path: Path, name: str) -> None:
    """And finds in it what was written."""
    rows = _rows(name)
    path = tmp_path / "workload.jsonl"
    write_rows(rows, path)
    read, report = logs.rows_of(path)
    assert report.num_unreadable == 0
    assert report.formats == {"workload.jsonl": "plain"}
    for row, logged in zip(rows, read, strict=True):
        request = logged.request
        assert request.messages == row.messages
        assert (request.conversation, request.turn) == (row.conversation, row.turn)
        assert (request.user, request.time_s) == (row.user, row.timestamp)
        assert request.answer == (row.answer or None)


@pytest.mark.parametrize("name", WORKLOADS)
def test_rows_are_bodies_that_any_server_takes(name: str) -> None:
    """Ends with a question, roles that every template knows, times and turns that go up."""
    rows = _rows(name)
    turns: dict[str, int] = defaultdict(int)
    for row in rows:
        document = json.loads(row.to_json())
        assert document["messages"][-1]["role"] == "user"
        assert {message["role"] for message in document["messages"]} <= {"system", "user", "assistant"}
        assert row.turn == turns[row.conversation]
        turns[row.conversation] += 1
    assert [row.timestamp for row in rows] == sorted(row.timestamp for row in rows)
    assert len({row.id for row in rows}) == NUM


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_are_of_a_realistic_length(name: str) -> None:
    """Hundreds to a few thousand tokens, at about four characters each."""
    lengths = sorted(len(text) for text in _texts(_rows(name)))
    assert 1000 <= lengths[NUM // 2] <= 16_000


@pytest.mark.parametrize("name", WORKLOADS)
def test_most_of_a_prompt_was_seen_before(name: str) -> None:
    """That is what they are for: at least 60 % of the second half stood in an earlier prompt."""
    texts = _texts(_rows(name))
    earlier: set[str] = set()
    shares = []
    for number, text in enumerate(texts):
        if number >= NUM // 2:
            shares.append(_covered(text, earlier))
        earlier |= _pieces(text)
    assert sum(shares) / len(shares) > 0.6


def test_template_prompts_differ_in_their_middle() -> None:
    """Two fillings of one form part early, and share most of what comes after."""
    texts = _texts(_rows("template"))
    first = texts[0]
    same = [text for text in texts[1:] if _covered(text, _pieces(first)) > 0.5]
    assert same
    for text in same:
        assert _common_prefix(first, text) < len(text) / 2


def test_template_leaves_no_slot_open() -> None:
    assert not [text for text in _texts(_rows("template")) if "{{" in text or "${" in text]


def test_header_prompts_differ_near_the_top() -> None:
    """Nothing but the first words is a common prefix; the long rest is the same."""
    one, two, *rest = _texts(_rows("header"))
    for text in (two, *rest):
        assert _common_prefix(one, text) < 60
    assert any(_covered(text, _pieces(one)) > 0.7 for text in rest)


def test_window_prompts_lose_their_oldest_turns() -> None:
    """What is left of a chat stands earlier in the prompt than a request before."""
    chats: dict[str, list[WorkloadRow]] = defaultdict(list)
    for row in _rows("window"):
        chats[row.conversation].append(row)
    shifted = 0
    for rows in chats.values():
        for before, after in pairwise(rows):
            old = [message["content"] for message in before.messages]
            new = [message["content"] for message in after.messages]
            shared = [content for content in new[1:] if content in old]
            if shared and old.index(shared[0]) > new.index(shared[0]):
                shifted += 1
                start = old.index(shared[0])
                assert new[1 : 1 + len(old) - start] == old[start:]
    assert shifted > NUM // 3


def test_a_window_always_has_the_last_question() -> None:
    """Even where it alone is larger; and never begins with an answer."""
    history = [
        {"role": "user", "content": "a" * 10},
        {"role": "assistant", "content": "b" * 10},
        {"role": "user", "content": "c" * 100},
    ]
    assert kept(history, 50) == (history[2],)
    assert kept(history, 115) == (history[2],)
    assert kept(history, 120) == tuple(history)


def test_resubmit_changes_one_user_turn() -> None:
    """What stood before it is equal, and what stands after it is equal or gone."""
    edits = 0
    chats: dict[str, list[WorkloadRow]] = defaultdict(list)
    for row in _rows("resubmit"):
        chats[row.conversation].append(row)
    for rows in chats.values():
        for before, after in pairwise(rows):
            old, new = before.messages, after.messages
            changed = [n for n, message in enumerate(new) if message != old[n]]
            assert len(changed) <= 1
            assert all(new[n]["role"] == "user" for n in changed)
            edits += len(changed)
    assert edits > NUM // 3


def test_revise_changes_one_passage_at_a_time() -> None:
    """From the state before, so that changes add up."""
    rows = [row for row in _rows("revise") if row.conversation == "revise-c0"]
    parts = [text.split("\n\n") for text in _texts(rows)]
    assert len(rows) == 41
    assert len({tuple(part) for part in parts}) > 38  # a word may be put in its own place
    for before, after in pairwise(parts):
        assert sum(old != new for old, new in zip(before, after, strict=True)) <= 1
    assert sum(old != new for old, new in zip(parts[0], parts[-1], strict=True)) > 1


def test_rag_documents_come_back_in_another_order() -> None:
    """The same passage at other places, in other company."""
    places: dict[str, set[int]] = defaultdict(set)
    for text in _texts(_rows("rag")):
        for place, part in enumerate(text.split("\n\n")[1:-1]):
            places[part].add(place)
    assert sum(len(found) > 2 for found in places.values()) > len(places) / 2


def test_agent_transcripts_grow_and_results_change() -> None:
    """Each request extends the one before; another run of the task differs in its results only."""
    runs: dict[str, list[WorkloadRow]] = defaultdict(list)
    for row in _rows("agent"):
        runs[row.conversation].append(row)
    last: dict[str, list[str]] = defaultdict(list)
    for rows in runs.values():
        for before, after in pairwise(rows):
            assert after.messages[: len(before.messages)] == before.messages
        last[rows[-1].messages[1]["content"]].append(_texts(rows[-1:])[0])
    again = next(texts for texts in last.values() if len(texts) > 1)
    assert again[0] != again[1]


def test_users_files_are_taken(tmp_path: Path) -> None:
    """In the published forms of the data sets."""
    passage = "The tower is forty metres high and made of granite from the quarry. " * 5
    rag = [
        {"question": "How high?", "ctxs": [{"title": "Tower", "text": passage}], "answers": [["forty"]]},
        {"question": "How wide?", "context": [["Weir", [passage, passage]]], "answer": "two"},
        {"question": "How old?", "paragraphs": [{"title": "Town", "paragraph_text": passage}]},
        {"title": "Bare", "text": passage},
        {"weather": "fine"},
    ]
    path = logs.write_lines(tmp_path / "rag", rag)
    assert {row.answer for row in _rows("rag", sources=(path,))} == {"forty", "two", None}
    assert len(_rows("agent", sources=(path,))) == NUM
    form = {
        "instruction": "cancel order 7",
        "response": "Dear {{Name}}, " + passage,
        "intent": "cancel_order",
    }
    path = logs.write_lines(tmp_path / "support", [form])
    assert "cancel order" in _texts(_rows("template", sources=(path,)))[0]


@pytest.mark.parametrize("name", WORKLOADS)
def test_sources_of_no_use_are_an_error(tmp_path: Path, name: str) -> None:
    """That says what would be of use."""
    path = logs.write_lines(tmp_path / "log", [{"prompt": "short"}])
    with pytest.raises(LogError, match=f"nothing is usable for '{name}', which needs"):
        _rows(name, sources=(path,))


def test_an_unknown_workload_is_an_error() -> None:
    with pytest.raises(LogError, match="unknown workload 'magic'"):
        _rows("magic")
