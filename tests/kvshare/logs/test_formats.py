"""Every published format: what becomes of a row, and that it is recognised."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from kvshare.errors import LogError
from kvshare.logs import FORMATS, ReadReport, read_file
from tests.kvshare.logs import logs
from tests.kvshare.logs.logs import EXAMPLES


def test_every_format_has_an_example() -> None:
    """Azure's traces are refused and have a test of their own."""
    assert {*EXAMPLES, "azure"} == FORMATS.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_format_is_recognised_by_its_rows(tmp_path: Path, name: str) -> None:
    """Neither the file's name nor a broken first row misleads."""
    path = logs.write_lines(tmp_path / "log", ["{broken", EXAMPLES[name]])
    _, report = logs.rows_of(path)
    assert report.formats == {"log": name}


def test_a_row_of_another_format_does_not_decide(tmp_path: Path) -> None:
    """A field that a format is known by may be empty: what can be read counts."""
    path = logs.write_lines(tmp_path / "log", [EXAMPLES["plain"], {"conversations": None}])
    assert logs.rows_of(path)[1].formats == {"log": "plain"}


@pytest.mark.parametrize("row", [logs.BATCH, logs.AIBRIX, {"prompt": "x", "output_tokens": 4}])
def test_variants_are_recognised(tmp_path: Path, row: dict[str, Any]) -> None:
    """Batch API lines, AIBrix's grouped requests and vLLM's custom data set."""
    path = logs.write_lines(tmp_path / "log", [row])
    assert logs.rows_of(path)[1].formats["log"] == ("openai" if "body" in row else "prompts")


def test_prompts_may_stand_in_any_field(tmp_path: Path) -> None:
    """Rows of no known format, their prompts' field named; a row without it is unreadable."""
    path = logs.write_lines(tmp_path / "log", [{"query": "What is it?", "messages": []}, {"text": "?"}])
    (only,) = logs.requests_of(path, "plain:query")
    assert (only.prompt, only.messages) == ("What is it?", None)
    with pytest.raises(LogError, match="plain:FIELD"):
        logs.requests_of(path, "query")


def test_a_named_format_is_not_second_guessed(tmp_path: Path) -> None:
    """A chat read as plain requests is one request with its whole history."""
    path = logs.write_lines(tmp_path / "log", [logs.CONVERSATION, logs.CONVERSATION])
    (first, _) = logs.requests_of(path, "plain")
    assert first.messages is not None
    assert len(first.messages) == 3


def test_no_known_format_is_an_error_that_names_them(tmp_path: Path) -> None:
    """So is a name that no format has."""
    path = logs.write_lines(tmp_path / "log", [{"weather": "fine"}])
    with pytest.raises(LogError, match="--format: one of mooncake"):
        logs.rows_of(path)
    with pytest.raises(LogError, match="unknown format 'excel'") as refused:
        logs.rows_of(path, "excel")
    assert "azure" not in str(refused.value), "it is always refused"


@pytest.mark.parametrize("rows", [[], ["", "  "], ["[]"], [gzip.compress(b"")]])
def test_an_empty_file_is_called_empty(tmp_path: Path, rows: list[str | bytes]) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else row.encode() for row in rows))
    with pytest.raises(LogError, match="log is empty"):
        logs.rows_of(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="none: cannot be opened"):
        list(read_file(tmp_path / "none", ReadReport()))
    with pytest.raises(LogError, match=r"^\.: cannot be opened"):  # a folder whose name has no last part
        list(read_file(Path(), ReadReport()))


def test_wildchat_has_a_request_per_user_turn_with_its_history(tmp_path: Path) -> None:
    """Users are the hashed addresses; times those of the answers, the row's where a message has none."""
    first, second = logs.requests_of(logs.write_lines(tmp_path / "log", [logs.WILDCHAT]))
    assert first.messages == ({"role": "user", "content": "Hello there"},)
    assert first.answer == "Hi."
    assert [m["content"] for m in second.messages or ()] == ["Hello there", "Hi.", "And now?"]
    assert second.answer == "Now nothing."
    assert (first.turn, second.turn) == (0, 1)
    assert first.conversation == second.conversation
    assert (first.user, first.language) == ("ab12", "English")
    assert first.time_s is not None
    assert second.time_s == first.time_s + 180


@pytest.mark.parametrize("without", ["timestamp", "detoxify_moderation"])
def test_older_wildchat_is_not_taken_for_lmsys(tmp_path: Path, without: str) -> None:
    """Either field tells them apart; the time is kept, and users are not named."""
    row = {name: value for name, value in logs.OLDER_WILDCHAT.items() if name != without}
    path = logs.write_lines(tmp_path / "log", [row])
    (request,) = logs.requests_of(path)
    assert logs.rows_of(path)[1].formats == {"log": "wildchat"}
    assert request.time_s == (None if without == "timestamp" else 1680998700.0)
    assert (request.user, request.answer) == (None, "Hi.")


def test_sharegpt_roles_are_translated(tmp_path: Path) -> None:
    """human asks, gpt answers; the last question has no answer."""
    first, second = logs.requests_of(logs.write_lines(tmp_path / "log", [logs.SHAREGPT]))
    assert (first.answer, second.answer) == ("It is short.", None)
    assert [m["role"] for m in second.messages or ()] == ["user", "assistant", "user"]
    assert first.time_s is None


def test_lmsys(tmp_path: Path) -> None:
    """One turn, with its language."""
    (request,) = logs.requests_of(logs.write_lines(tmp_path / "log", [logs.LMSYS]))
    assert (request.answer, request.language) == ("With flour.", "English")


def test_rows_of_data_sets_are_conversations_of_their_own(tmp_path: Path) -> None:
    """Data sets repeat ids; two copies of a row must not become one conversation."""
    path = logs.write_lines(tmp_path / "log", [logs.WILDCHAT, logs.WILDCHAT])
    assert len({request.conversation for request in logs.requests_of(path)}) == 2


def test_openai_bodies_bare_and_in_batches(tmp_path: Path) -> None:
    """The body is the request: one, with all its messages."""
    bare, batch = logs.requests_of(logs.write_lines(tmp_path / "log", [logs.OPENAI, logs.BATCH]))
    assert (bare.user, bare.time_s, len(bare.messages or ())) == ("u7", 1700000000.0, 2)
    assert batch.messages == ({"role": "user", "content": "What is KV?"},)


@pytest.mark.parametrize("row", [logs.BATCH, logs.SHAREGPT, logs.LMSYS, logs.AIBRIX, logs.PLAIN])
def test_users_are_not_invented(tmp_path: Path, row: dict[str, Any]) -> None:
    """Where a log names none there is none."""
    requests = logs.requests_of(logs.write_lines(tmp_path / "log", [row]))
    assert {request.user for request in requests} == {None}


def test_openai_prompts_parts_tools_input_and_answers(tmp_path: Path) -> None:
    """The other shapes that the API takes."""
    rows = [
        {"model": "m", "prompt": ["One", "Two"]},
        {"model": "m", "prompt": [1, 2, 3]},
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "Part"}]}]},
        {"model": "m", "tools": [{"name": "f"}], "messages": [{"role": "user", "content": "Go"}]},
        {"model": "m", "instructions": "Be kind.", "input": "Say it"},
        {
            "request": {"model": "m", "messages": [{"role": "user", "content": "Q"}]},
            "response": {"choices": [{"message": {"role": "assistant", "content": "A"}}]},
            "session_id": "s1",
        },
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "Look"},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
                {"role": "tool", "content": "42", "tool_call_id": "1"},
            ],
        },
    ]
    one, two, ids, part, tools, given, logged, called = logs.requests_of(
        logs.write_lines(tmp_path / "log", rows)
    )
    assert (one.prompt, two.prompt) == ("One", "Two")
    assert one.conversation != two.conversation
    assert ids.token_ids == (1, 2, 3)
    assert (part.messages or ())[0]["content"] == "Part"
    assert (tools.messages or ())[0] == {"role": "system", "content": '[{"name": "f"}]'}
    assert [m["role"] for m in given.messages or ()] == ["system", "user"]
    assert (logged.answer, logged.conversation) == ("A", "s1")
    assert (called.messages or ())[1]["content"] == '[{"id":"1"}]'


def test_mooncake_has_blocks_and_milliseconds(tmp_path: Path) -> None:
    (request,) = logs.requests_of(logs.write_lines(tmp_path / "log", [logs.MOONCAKE]))
    assert (request.block_hashes, request.block_size) == ((46, 47, 2366), 512)
    assert (request.time_s, request.num_tokens) == (27.482, 1100)
    assert (request.user, request.turn) == (None, None)


def test_azure_has_lengths_only(tmp_path: Path) -> None:
    """It is detected in order to say why it cannot be replayed."""
    with pytest.raises(LogError, match="log has only the lengths of requests"):
        logs.requests_of(logs.write_lines(tmp_path / "log", [logs.AZURE]))


def test_prompts_with_lengths(tmp_path: Path) -> None:
    """guidellm's and vLLM's rows, AIBrix's groups and its flat form."""
    flat = {"timestamp_ms": 21, "prompt_tokens": 9, "output_tokens": 22, "prompt": "Flat"}
    rows = [logs.GUIDELLM, logs.AIBRIX, flat, {"prompt": "Bare"}]
    guide, one, _, last, bare = logs.requests_of(logs.write_lines(tmp_path / "log", rows))
    assert guide.prompt == "Explain tides"
    assert (one.time_s, one.conversation) == (1.5, "0")
    assert (last.time_s, bare.prompt) == (0.021, "Bare")


def test_load_tools_name_users_as_other_logs_do(tmp_path: Path) -> None:
    """One list of names for all rows that are requests."""
    row = {**logs.GUIDELLM, "conversation_id": "c1", "user_id": 7, "tenant": "north"}
    (request,) = logs.requests_of(logs.write_lines(tmp_path / "log", [row]))
    assert (request.conversation, request.user, request.namespace) == ("c1", "7", "north")


def test_a_cache_salt_divides_what_a_log_names(tmp_path: Path) -> None:
    """As the server divides it: equal ones meet, and a salt cannot name another namespace."""
    own: list[dict[str, str]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"tenant": "x", "cache_salt": "a"},
    ]
    crafted = [
        {"tenant": "default:a"},
        {"tenant": "x:a"},
        {"tenant": "x", "cache_salt": "a:b"},
        {"tenant": "x:a", "cache_salt": "b"},
    ]
    rows = [{"prompt": "p", **more} for more in [*own, *crafted] * 2]
    found = [request.namespace for request in logs.requests_of(logs.write_lines(tmp_path / "log", rows))]
    assert found[:8] == found[8:]
    assert len(set(found)) == 8
    assert found[0] == "default"


def test_how_long_something_took_is_not_when_it_was_asked(tmp_path: Path) -> None:
    """In rows that are not our own, `time` may be a latency, in any form, and a language a list of them."""
    row = {**logs.GUIDELLM, "time": "0.5 s", "lang": ["en"]}
    (request,) = logs.requests_of(logs.write_lines(tmp_path / "log", [row]))
    assert (request.time_s, request.language) == (None, "unknown")


def test_a_conversation_may_begin_with_the_assistant(tmp_path: Path) -> None:
    """Slices of long chats do."""
    (request,) = logs.requests_of(logs.write_lines(tmp_path / "log", [logs.CONVERSATION]))
    assert [m["role"] for m in request.messages or ()] == ["assistant", "user"]
    assert (request.answer, request.language) == ("Then goodbye.", "en")


def test_plain_rows_carry_what_a_log_knows(tmp_path: Path) -> None:
    """Every optional field; the turn is counted where it is not given."""
    row = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        "conversation": "c1",
        "user": 7,
        "timestamp": 1700000000123,
        "answer": "d",
        "lang": "fr",
        "namespace": "north",
    }
    first, second = logs.requests_of(logs.write_lines(tmp_path / "log", [row, {**row, "turn": 9}]))
    assert (first.turn, second.turn) == (1, 9)
    assert (first.conversation, first.user, first.answer) == ("c1", "7", "d")
    assert (first.time_s, first.language, first.namespace) == (1700000000.123, "fr", "north")
