"""Rows that cannot be read are counted by file, line and reason, and none of their text gets out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvshare.errors import LogError
from kvshare.logs import RowFault, files
from kvshare.logs.rows import NUM_SHOWN
from tests.kvshare.logs import logs
from tests.kvshare.logs.logs import EXAMPLES

ASKED = {"role": "user", "content": "Hello"}
BROKEN: list[tuple[str, Any, RowFault]] = [
    ("plain", "{broken", RowFault.BAD_JSON),
    ("plain", '{"prompt": ' + "9" * 5000 + "}", RowFault.BAD_JSON),
    ("plain", '{"prompt": ' + "[" * 100_000, RowFault.BAD_JSON),
    ("plain", b'{"prompt": "\xff"}', RowFault.BAD_UTF8),
    ("plain", '{"prompt": "\\ud800"}', RowFault.BAD_UTF8),
    ("plain", "17", RowFault.NOT_AN_OBJECT),
    ("plain", {"prompt": "  "}, RowFault.EMPTY),
    ("plain", {"prompt": 3}, RowFault.WRONG_TYPE),
    ("plain", {"messages": []}, RowFault.EMPTY),
    ("plain", {"messages": "hello"}, RowFault.WRONG_TYPE),
    ("plain", {"messages": ["hello"]}, RowFault.WRONG_TYPE),
    ("plain", {"messages": [None]}, RowFault.MISSING_FIELD),
    ("plain", {"messages": [{"role": "user"}]}, RowFault.MISSING_FIELD),
    ("plain", {"messages": [{"role": "wizard", "content": "x"}]}, RowFault.UNKNOWN_ROLE),
    ("plain", {"messages": [{"role": "system", "content": "x"}]}, RowFault.NO_USER_TURN),
    ("plain", {"messages": [ASKED], "turn": -1}, RowFault.WRONG_TYPE),
    ("plain", {"messages": [ASKED], "turn": True}, RowFault.WRONG_TYPE),
    ("plain", {"messages": [ASKED], "turn": 1 << 31}, RowFault.WRONG_TYPE),
    ("plain", {"messages": [ASKED], "timestamp": "soon"}, RowFault.WRONG_TYPE),
    ("plain", '{"prompt": "x", "timestamp": 1e999}', RowFault.WRONG_TYPE),
    ("plain", {"token_ids": [1, 1 << 40]}, RowFault.WRONG_TYPE),
    ("plain", {"token_ids": []}, RowFault.EMPTY),
    ("plain", {"messages": "[1]"}, RowFault.WRONG_TYPE),
    ("plain", {"messages": '[{"role": "user"'}, RowFault.WRONG_TYPE),
    ("openai", {"body": "x"}, RowFault.WRONG_TYPE),
    ("openai", {"body": '{"model": "m"}'}, RowFault.MISSING_FIELD),
    ("openai", {"model": "m", "messages": {}, "proxy_server_request": {}, "startTime": "x"}, RowFault.EMPTY),
    ("openai", {"model": "m", "messages": "{}"}, RowFault.EMPTY),
    ("openai", {"model": "m"}, RowFault.MISSING_FIELD),
    (
        "openai",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        RowFault.NOT_TEXT,
    ),
    ("wildchat", {"conversation_hash": "x"}, RowFault.MISSING_FIELD),
    ("wildchat", {"conversation": None, "messages": None}, RowFault.MISSING_FIELD),
    ("wildchat", {"conversation": [ASKED], "timestamp": []}, RowFault.WRONG_TYPE),
    ("sharegpt", {"conversations": None}, RowFault.MISSING_FIELD),
    ("sharegpt", {"conversations": "[]"}, RowFault.EMPTY),
    ("sharegpt", {"conversations": [{"from": "gpt", "value": "x"}]}, RowFault.NO_USER_TURN),
    ("sharegpt", {"conversations": [{"from": "human", "value": ""}]}, RowFault.EMPTY),
    ("lmsys", {"conversation": {"role": "user"}}, RowFault.WRONG_TYPE),
    ("mooncake", {"input_length": 5}, RowFault.MISSING_FIELD),
    ("mooncake", {"input_length": 5, "hash_ids": 3}, RowFault.WRONG_TYPE),
    ("mooncake", {"input_length": 5, "hash_ids": [1, 2]}, RowFault.WRONG_TYPE),
    ("mooncake", {"input_length": 0, "hash_ids": []}, RowFault.EMPTY),
    ("prompts", {"requests": []}, RowFault.EMPTY),
    ("prompts", {"requests": [{"prompt_length": 3}]}, RowFault.MISSING_FIELD),
    ("prompts", {"requests": ["x"]}, RowFault.WRONG_TYPE),
    ("conversations", {"messages": [{"role": "assistant", "content": "x"}]}, RowFault.NO_USER_TURN),
]


@pytest.mark.parametrize(("name", "row", "reason"), BROKEN)
def test_a_broken_row_costs_itself_only(tmp_path: Path, name: str, row: Any, reason: RowFault) -> None:
    """The rows around it are read; it is counted with its line and why."""
    path = logs.write_lines(tmp_path / "log", [row, EXAMPLES[name]])
    read, report = logs.rows_of(path, name)
    assert [(each.source, each.line, each.reason) for each in report.examples] == [("log", 1, reason)]
    assert report.unreadable().reasons == {reason: 1}
    assert len(read) == 1


@pytest.mark.parametrize(("name", "row", "reason"), BROKEN)
def test_a_log_of_broken_rows_is_an_error_that_counts_them(
    tmp_path: Path, name: str, row: Any, reason: RowFault
) -> None:
    """How many rows there were, and why none was read; none of their text."""
    path = logs.write_lines(tmp_path / "log", [row, row])
    with pytest.raises(LogError, match=rf"log: none of its 2 rows .* as {name} .*: {reason} 2\)"):
        logs.rows_of(path, name)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"requests": [{"prompt": "a"}, {"prompt": 3}, {"prompt": "b"}]}, RowFault.WRONG_TYPE),
        ({"model": "m", "prompt": ["a", " ", "b"]}, RowFault.EMPTY),
    ],
)
def test_a_broken_request_costs_none_of_its_row(tmp_path: Path, row: Any, reason: RowFault) -> None:
    """Where a row holds several, the good ones are read and the bad one is counted."""
    read, report = logs.rows_of(logs.write_lines(tmp_path / "log", [row]))
    assert [each.request.prompt for each in read] == ["a", "b"]
    assert [(each.line, each.reason) for each in report.examples] == [(1, reason)]


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    """Before, between and after; lines are numbered with them."""
    path = logs.write_lines(tmp_path / "log", [b"\xef\xbb\xbf", logs.PLAIN, "", "17", " \t", "\r"])
    assert logs.reasons_of(path) == [(4, "not_an_object")]
    assert len(logs.requests_of(path)) == 1


def test_all_are_counted_and_the_first_few_shown(tmp_path: Path) -> None:
    """The report is what `results.json` has, and holds no text of the log."""
    rows = ['{"secret'] * (NUM_SHOWN + 5) + [logs.PLAIN]
    _, report = logs.rows_of(logs.write_lines(tmp_path / "log", rows))
    document = report.unreadable()
    assert document.num_rows == NUM_SHOWN + 5
    assert document.reasons == {"bad_json": NUM_SHOWN + 5}
    assert len(report.examples) == NUM_SHOWN
    assert "secret" not in str(document)


def test_a_row_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In lines and in arrays."""
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 100)
    long = {"prompt": "x" * 5000}
    path = logs.write_lines(tmp_path / "lines", [long, logs.PLAIN])
    assert logs.reasons_of(path) == [(1, "too_long")]
    assert len(logs.requests_of(path)) == 1
