"""Several files become one stream: complete, in time order, no turn before the turns it builds on."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshare.errors import LogError
from kvshare.logs.requests import LoggedRequest
from kvshare.replay.stream import RequestStream
from tests.kvshare.logs import logs


def _row(number: int, conversation: str, turn: int, time_s: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": f"p{number}", "conversation": conversation, "turn": turn}
    return row if time_s is None else {**row, "timestamp": time_s}


def _write(folder: Path, files: Sequence[Sequence[dict[str, Any]]]) -> list[Path]:
    return [logs.write_lines(folder / f"log-{n}", rows) for n, rows in enumerate(files) if rows]


def _prompts(requests: Sequence[LoggedRequest]) -> list[str | None]:
    return [request.prompt for request in requests]


KEYS = st.tuples(
    st.sampled_from("abcd"), st.integers(0, 3), st.none() | st.integers(0, 9) | st.just(1_700_000_000)
)
FILES = st.lists(st.lists(KEYS, min_size=1, max_size=12), min_size=1, max_size=3)


def _numbered(
    files: Sequence[Sequence[tuple[str, int, float | None]]],
) -> list[list[dict[str, Any]]]:
    numbers = iter(range(1000))
    return [[_row(next(numbers), *key) for key in rows] for rows in files]


@settings(max_examples=60, deadline=None)
@given(FILES, st.integers(1, 4), st.none() | st.integers(0, 5))
def test_the_stream_is_a_causal_permutation_in_time_order(
    keys: list[list[tuple[str, int, float | None]]], interleave: int, seed: int | None
) -> None:
    """Whatever times and turns the files have."""
    files = _numbered(keys)
    with tempfile.TemporaryDirectory() as folder:
        paths = _write(Path(folder), files)
        with RequestStream(paths, interleave=interleave, seed=seed) as stream:
            requests = list(stream)
            again = list(stream)
    given_prompts = [row["prompt"] for rows in files for row in rows]
    assert sorted(given_prompts) == sorted(p for p in _prompts(requests) if p is not None)
    assert _prompts(again) == _prompts(requests)
    latest: dict[str, int] = {}
    for request in requests:
        assert request.turn is not None
        assert latest.get(request.conversation, 0) <= request.turn
        latest[request.conversation] = request.turn
    _check_times(files, requests)


def _check_times(files: list[list[dict[str, Any]]], requests: Sequence[LoggedRequest]) -> None:
    """They count as logged, or as the request before in the file, and never before earlier turns."""
    own: dict[str, float] = {}
    for rows in files:
        time_s = float("-inf")
        for row in rows:
            time_s = own[row["prompt"]] = row.get("timestamp", time_s)
    effective: list[float] = []
    latest: dict[str, float] = {}
    for request in requests:
        assert request.prompt is not None
        time_s = max(own[request.prompt], latest.get(request.conversation, float("-inf")))
        latest[request.conversation] = time_s
        effective.append(time_s)
    assert effective == sorted(effective)


def test_without_times_the_files_order_stands(tmp_path: Path) -> None:
    """Conversations follow each other whole."""
    files = [[_row(0, "a", 0, None), _row(1, "a", 1, None)], [_row(2, "b", 0, None), _row(3, "b", 1, None)]]
    with RequestStream(_write(tmp_path, files)) as stream:
        assert _prompts(list(stream)) == ["p0", "p1", "p2", "p3"]


def test_open_conversations_take_turns(tmp_path: Path) -> None:
    """In rotation without a seed; the same way each time with one."""
    files = [[_row(10 * c + t, "abc"[c], t, None) for c in range(3) for t in range(2)]]
    paths = _write(tmp_path, files)
    with RequestStream(paths, interleave=2) as stream:
        assert _prompts(list(stream)) == ["p0", "p10", "p1", "p11", "p20", "p21"]
    drawn = set()
    for seed in range(8):
        with (
            RequestStream(paths, interleave=2, seed=seed) as first,
            RequestStream(paths, interleave=2, seed=seed) as second,
        ):
            assert _prompts(list(first)) == _prompts(list(second))
            drawn.add(tuple(_prompts(list(first))))
    assert len(drawn) > 1


def test_a_clock_that_went_backwards_breaks_no_conversation(tmp_path: Path) -> None:
    """Turn 1 says it came before turn 0; it comes after."""
    files = [[_row(0, "a", 0, 100), _row(1, "a", 1, 50), _row(2, "b", 0, 70)]]
    with RequestStream(_write(tmp_path, files)) as stream:
        assert _prompts(list(stream)) == ["p2", "p0", "p1"]


@pytest.mark.parametrize("name", ["prompts", "plain", "openai"])
def test_turns_without_a_number_are_counted(tmp_path: Path, name: str) -> None:
    """Per session, in the files' order; a row of no session is a first prompt."""
    examples: dict[str, dict[str, object]] = {
        "prompts": {"output_tokens": 4},
        "plain": {},
        "openai": {"model": "m"},
    }
    sessions = ["s", "t", "s", None, "s", "t"]
    rows = [
        {"prompt": f"p{number}", "session_id": session, "timestamp": number, **examples[name]}
        for number, session in enumerate(sessions)
    ]
    with RequestStream(_write(tmp_path, [rows[:3], rows[3:]])) as stream:
        assert set(stream.report.formats.values()) == {name}
        assert [(r.prompt, r.turn) for r in stream] == [
            (f"p{number}", turn) for number, turn in enumerate([0, 0, 1, 0, 2, 1])
        ]


def test_turns_that_have_a_number_keep_it(tmp_path: Path) -> None:
    """Those without one go on from there; where a log names no session, none is made up."""
    numbered, bare = _row(0, "a", 7, None), {"prompt": "p1", "conversation": "a"}
    with RequestStream(_write(tmp_path, [[bare, numbered], [logs.MOONCAKE]])) as stream:
        assert [(r.prompt, r.turn) for r in stream] == [("p0", 7), ("p1", 8), (None, None)]


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Two logs from two folders have no conversation in common."""
    paths = []
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        paths.append(logs.write_lines(tmp_path / name / "log", [logs.SHAREGPT]))
    with RequestStream(paths) as stream:
        requests = list(stream)
    assert [request.source for request in requests] == ["log", "log", "log (2)", "log (2)"]
    assert len({request.conversation for request in requests}) == 2


def test_every_kind_of_request_survives_the_disk(tmp_path: Path) -> None:
    """What comes out is what the reader gave."""
    for name, row in {"w": logs.WILDCHAT, "o": logs.OPENAI, "m": logs.MOONCAKE, "g": logs.GUIDELLM}.items():
        path = logs.write_lines(tmp_path / name, [row, row])
        with RequestStream([path]) as stream:
            assert sorted(map(repr, stream)) == sorted(map(repr, logs.requests_of(path)))


def test_lengths_alone_are_refused(tmp_path: Path) -> None:
    """Plainly, and nothing stays behind on the disk."""
    path = logs.write_lines(tmp_path / "log", [logs.AZURE])
    folder = tmp_path / "temporary"
    folder.mkdir()
    with pytest.raises(LogError, match="log has only the lengths"), RequestStream([path], folder=folder):
        pass
    assert not list(folder.iterdir())


def test_the_text_on_disk_is_private_and_goes(tmp_path: Path) -> None:
    """Only its owner may look into the folder, while it lasts."""
    path = logs.write_lines(tmp_path / "log", [logs.PLAIN])
    folder = tmp_path / "temporary"
    folder.mkdir()
    with RequestStream([path], folder=folder) as stream:
        (inside,) = folder.iterdir()
        assert inside.stat().st_mode & 0o077 == 0
        assert len(list(stream)) == 1
    assert not list(folder.iterdir())


def test_unreadable_rows_are_reported(tmp_path: Path) -> None:
    path = logs.write_lines(tmp_path / "log", ["{", json.dumps(logs.PLAIN)])
    with RequestStream([path]) as stream:
        assert len(stream) == 1
        assert stream.report.num_unreadable == 1
