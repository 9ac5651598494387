"""What files of documents and bodies come to, line by line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvshare.errors import LogError
from kvshare.logs.rows import RowFault
from kvshare.warming.entries import Place, WarmingEntry, read_entries

CHAT = {"messages": [{"role": "user", "content": "SECRET"}]}


def one(tmp_path: Path, row: object) -> WarmingEntry:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    (entry,) = read_entries([path])
    return entry


def body_of(tmp_path: Path, row: object) -> dict[str, Any]:
    entry = one(tmp_path, row)
    assert entry.reason is None
    return dict(entry.body)


@pytest.mark.parametrize("name", ["house.txt", "house.md", "HOUSE.MD"])
def test_a_document_is_what_a_user_says(tmp_path: Path, name: str) -> None:
    """Whole, and without the mark that some editors put in front."""
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf# A house\n\nIt has a door: \xc3\xa4.\n")
    (entry,) = read_entries([path])
    assert entry.reason is None
    assert (entry.path, entry.place) == ("v1/chat/completions", Place(str(path), 1))
    assert entry.body["messages"] == [{"role": "user", "content": "# A house\n\nIt has a door: ä.\n"}]


def test_a_row_is_sent_as_it_is_but_for_the_answer(tmp_path: Path) -> None:
    """Tools and whatever else makes the prompt stay; label and length of the answer do not."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    row = {
        **CHAT,
        "label": "form",
        "model": "mine",
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 9,
        "n": 3,
        "max_tokens": 500,
        "temperature": 0.7,
    }
    assert body_of(tmp_path, row) == {
        **CHAT,
        "model": "mine",
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
        "kvshare": {"mode": "exact", "no_store": False},
        "max_tokens": 1,
        "temperature": 0,
    }


@pytest.mark.parametrize(
    "row",
    [
        {"messages": json.dumps(CHAT["messages"])},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
        {"request": json.dumps(CHAT), "response": {"choices": []}},
        {"call_type": "acompletion", "model": "m", "messages": CHAT["messages"], "api_key": "88dc"},
        {"call_type": "acompletion", "messages": "{}", "proxy_server_request": json.dumps(CHAT)},
        {**CHAT, "response": {"choices": []}},
    ],
)
def test_of_a_log_only_the_request_is_sent(tmp_path: Path, row: object) -> None:
    """A body in a row, or as JSON text; not what the log says of it, nor its answer."""
    assert body_of(tmp_path, row) == {
        **CHAT,
        "kvshare": {"mode": "exact", "no_store": False},
        "max_tokens": 1,
        "temperature": 0,
    }


def test_what_is_stored_for_others_is_exact_unless_a_row_says_otherwise(tmp_path: Path) -> None:
    assert body_of(tmp_path, CHAT)["kvshare"] == {"mode": "exact", "no_store": False}
    assert body_of(tmp_path, {**CHAT, "kvshare": {"mode": "approx"}})["kvshare"] == {"mode": "approx"}


@pytest.mark.parametrize("prompt", ["a text", [1, 2, 3]])
def test_a_prompt_is_a_completion(tmp_path: Path, prompt: object) -> None:
    entry = one(tmp_path, {"prompt": prompt})
    assert entry.reason is None
    assert (entry.path, entry.body["prompt"]) == ("v1/completions", prompt)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"label": "x"}, RowFault.MISSING_FIELD),
        ({"prompt": None}, RowFault.MISSING_FIELD),
        ({"messages": []}, RowFault.EMPTY),
        ({"prompt": ""}, RowFault.EMPTY),
        ({"messages": "SECRET"}, RowFault.WRONG_TYPE),
        ({"prompt": {"text": "SECRET"}}, RowFault.WRONG_TYPE),
        ({"prompt": ["SECRET", "two prompts"]}, RowFault.WRONG_TYPE),
        ({**CHAT, "label": 7}, RowFault.WRONG_TYPE),
        ({"messages": "{}", "call_type": "acompletion"}, RowFault.EMPTY),
        ({"body": "SECRET"}, RowFault.WRONG_TYPE),
        (["SECRET"], RowFault.NOT_AN_OBJECT),
    ],
)
def test_a_row_that_is_no_single_prompt_is_named_without_its_text(
    tmp_path: Path, row: object, reason: RowFault
) -> None:
    entry = one(tmp_path, row if isinstance(row, dict) else {"x": 1})
    if not isinstance(row, dict):
        path = tmp_path / "two.jsonl"
        path.write_text(json.dumps(7) + "\n", encoding="utf-8")
        (entry,) = read_entries([path])
    assert entry.reason is reason
    assert "SECRET" not in repr(entry)


def test_a_malformed_line_costs_only_itself(tmp_path: Path) -> None:
    """Blank lines have numbers and are nothing else."""
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(CHAT)}\nSECRET\n\n{json.dumps({**CHAT, 'label': 'l'})}\n", encoding="utf-8")
    first, second, third = read_entries([path])
    assert first.reason is None
    assert second == WarmingEntry(Place(str(path), 2), reason=RowFault.BAD_JSON)
    assert third.place == Place(str(path), 4, "l")


def test_several_files_of_several_kinds_come_in_order(tmp_path: Path) -> None:
    document, rows, array = tmp_path / "a.txt", tmp_path / "b.jsonl.gz", tmp_path / "c.json"
    document.write_text("A text.", encoding="utf-8")
    rows.write_bytes(gzip.compress(json.dumps(CHAT).encode()))
    array.write_text(json.dumps([CHAT, {"prompt": "a"}]), encoding="utf-8")
    entries = list(read_entries([rows, array, document]))
    assert [(Path(entry.place.file).name, entry.place.line) for entry in entries] == [
        ("b.jsonl.gz", 1),
        ("c.json", 1),
        ("c.json", 2),
        ("a.txt", 1),
    ]


@pytest.mark.parametrize(
    ("content", "reason"), [(b"\xff\xfe\x00", RowFault.BAD_UTF8), (b" \n", RowFault.EMPTY)]
)
def test_a_document_without_text_is_none(tmp_path: Path, content: bytes, reason: RowFault) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert list(read_entries([path])) == [WarmingEntry(Place(str(path), 1), reason=reason)]


@pytest.mark.parametrize("name", ["missing.txt", "missing.jsonl"])
def test_a_file_that_cannot_be_opened_ends_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(LogError, match=f"{name}: cannot be opened"):
        list(read_entries([tmp_path / name]))


@pytest.mark.parametrize("content", [b"", b"\n \n", b"[]", gzip.compress(b"")])
def test_a_file_without_rows_ends_it(tmp_path: Path, content: bytes) -> None:
    """Nothing to warm is an error, as it is to replay."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(LogError, match=r"rows\.jsonl is empty"):
        list(read_entries([path]))
