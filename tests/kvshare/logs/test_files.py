"""Gzip, zstd, Parquet and JSON arrays are read like plain lines, and only as far as asked for."""

from __future__ import annotations

import gzip
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvshare.errors import LogError
from kvshare.logs import ReadReport, read_file
from kvshare.logs.files import array_elements
from kvshare.logs.rows import RowFault
from tests.kvshare.logs import logs

LINES = "".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(500)).encode()


def _prompts(path: Path) -> list[str | None]:
    return [request.prompt for request in logs.requests_of(path)]


def _two_frames(data: bytes) -> bytes:
    half = data.index(b"\n", len(data) // 2) + 1
    return zstandard.compress(data[:half]) + zstandard.compress(data[half:])


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress, _two_frames, bytes])
def test_compression_makes_no_difference(tmp_path: Path, compress: object) -> None:
    """Told by content: the name says nothing."""
    assert callable(compress)
    path = tmp_path / "log"
    path.write_bytes(compress(LINES))
    assert _prompts(path) == [f"prompt {number}" for number in range(500)]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_a_file_that_breaks_off_says_where(tmp_path: Path, compress: object) -> None:
    """What came before is read."""
    assert callable(compress)
    path = tmp_path / "log"
    data = compress(LINES * 20 + bytes(range(256)) * 400)
    path.write_bytes(data[: len(data) * 9 // 10])
    read, report = logs.rows_of(path, "plain")
    assert report.unreadable().reasons[RowFault.TRUNCATED] == 1
    assert 0 < len(read) <= 500 * 20


def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n").rstrip())
    assert len(_prompts(path)) == 500


def test_an_array_is_read_element_by_element(tmp_path: Path) -> None:
    """As ShareGPT is published; a broken element costs itself, and numbers count elements."""
    good = json.dumps(logs.SHAREGPT, indent=2)
    path = tmp_path / "log"
    path.write_text(f"[{good}, {{broken}}, 17,\n{good}]", encoding="utf-8")
    rows, report = logs.rows_of(path)
    assert [row.request.line for row in rows] == [1, 4]
    assert [(each.line, str(each.reason)) for each in report.examples] == [
        (2, "bad_json"),
        (3, "not_an_object"),
    ]
    path.write_text(f"[{good}, ", encoding="utf-8")
    assert logs.reasons_of(path) == [(2, "truncated")]


def test_a_line_that_begins_with_a_bracket_is_a_line(tmp_path: Path) -> None:
    """Somebody's logger wrote into the file."""
    path = logs.write_lines(tmp_path / "log", ["[INFO] started", logs.PLAIN])
    assert logs.reasons_of(path) == [(1, "bad_json")]


class _InPieces(io.BytesIO):
    """Reads come in pieces of a few bytes."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.lists(JSON), st.booleans())
def test_array_elements_are_what_json_finds(values: list[object], in_pieces: bool) -> None:
    """However the bytes arrive."""
    data = json.dumps(values, ensure_ascii=False, indent=1).encode()
    stream = _InPieces(data) if in_pieces else io.BytesIO(data)
    elements = [element for _, element in array_elements(stream, max_bytes=1 << 20)]
    assert [json.loads(element) for element in elements if isinstance(element, bytes)] == values


def test_a_long_array_element_is_passed_over() -> None:
    data = json.dumps(["x" * 5000, "y"]).encode()
    found = list(array_elements(_InPieces(data), max_bytes=100))
    assert found == [(1, RowFault.TOO_LONG), (2, b' "y"')]


def test_parquet_as_published(tmp_path: Path) -> None:
    """With real timestamps and nested messages; broken columns are counted by row number."""
    when = datetime(2023, 4, 9, 0, 5, tzinfo=UTC)
    said = [{"content": "Hi", "role": "user", "hashed_ip": "ab", "timestamp": None}]
    table = pyarrow.table(
        {
            "conversation_hash": ["a", "b", "c"],
            "timestamp": pyarrow.array([when] * 3, pyarrow.timestamp("us", tz="UTC")),
            "conversation": [said, [], said],
            "language": ["English"] * 3,
            "openai_moderation": [[{"flagged": False}]] * 3,
        }
    )
    path = tmp_path / "train-00000-of-00014"
    pyarrow.parquet.write_table(table, path)
    rows, report = logs.rows_of(path)
    assert report.formats == {path.name: "wildchat"}
    assert [row.at(0).time_s for row in rows] == [when.timestamp()] * 2
    assert [(each.line, each.reason) for each in report.examples] == [(2, RowFault.EMPTY)]


def _write_groups(path: Path, column: Any) -> None:
    """Row groups of 100."""
    table = pyarrow.table({"prompt": column})
    pyarrow.parquet.write_table(table, path, row_group_size=100, compression="zstd", use_dictionary=False)


def test_a_damaged_row_group_costs_itself(tmp_path: Path) -> None:
    """Its rows are counted, each with its number; those after it are read."""
    path = tmp_path / "log"
    _write_groups(path, [f"prompt {number}" for number in range(1, 301)])
    metadata = pyarrow.parquet.read_metadata(path)
    column = metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start, size = column.data_page_offset, column.total_compressed_size
    data[start + size // 2 : start + size] = b"\xff" * (size - size // 2)
    path.write_bytes(data)
    rows, report = logs.rows_of(path, "plain")
    lines = [row.request.line for row in rows]
    assert lines == [*range(1, 101), *range(201, 301)]
    assert [row.request.prompt for row in rows] == [f"prompt {line}" for line in lines]
    assert report.unreadable().reasons == {RowFault.DAMAGED: 100}
    assert report.examples[0].line == 101


def test_a_value_that_cannot_be_read_costs_its_row(tmp_path: Path) -> None:
    """A string that is no UTF-8, a time after the year 9999: the rows around them are read."""
    texts = pyarrow.array([b"good", b"\xff", b"fine"])
    (_, offsets, data) = texts.buffers()
    prompts = pyarrow.Array.from_buffers(pyarrow.string(), 3, [None, offsets, data])
    path = tmp_path / "log"
    _write_groups(path, prompts)
    rows, report = logs.rows_of(path)
    assert [row.request.prompt for row in rows] == ["good", "fine"]
    assert [(each.line, each.reason) for each in report.examples] == [(2, RowFault.BAD_UTF8)]
    times = pyarrow.array([0, 1 << 60, 0], pyarrow.timestamp("ms"))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"], "timestamp": times}), path)
    assert logs.reasons_of(path) == [(2, "wrong_type")]


def test_parquet_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"PAR1" + b"x" * 100)
    with pytest.raises(LogError, match="cannot be read as such"):
        logs.rows_of(path)


def test_three_rows_of_a_huge_file_do_not_read_it_all(tmp_path: Path) -> None:
    """A sparse file of a terabyte: reading more than its beginning would never end."""
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(LINES)
        file.truncate(1 << 40)
    rows = read_file(path, ReadReport())
    assert [next(rows).request.prompt for _ in range(3)] == ["prompt 0", "prompt 1", "prompt 2"]
