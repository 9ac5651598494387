"""The live replay measures a real server, and sets what it says beside the prediction."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from kvshare.errors import ConfigError, UnreachableError
from kvshare.replay.live import LIVE_POLICIES, LiveOptions, Pace, replay_live, summarise
from kvshare.replay.options import ReplayOptions
from kvshare.replay.policies import parse_policies
from kvshare.settings import load_settings
from tests.conftest import Server
from tests.kvshare.replay.synthetic import request


def _options(tmp_path: Path, log: Path) -> ReplayOptions:
    return ReplayOptions(
        paths=[log],
        out=tmp_path,
        policies=parse_policies(LIVE_POLICIES),
        settings=load_settings(),
        tokenizer="demo",
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A chat of three turns, and one prompt that is far too long."""
    form = " ".join(f"item {number} costs {number * 7} coins." for number in range(30))
    conversation = []
    for turn in range(3):
        conversation.append({"role": "user", "content": f"planted {form} question {turn}?"})
        conversation.append({"role": "assistant", "content": f"answer {turn}"})
    rows = [
        {"id": "chat", "messages": conversation},
        {"id": "long", "messages": [{"role": "user", "content": "word " * 9000}]},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_live_replay_times_requests_and_compares(server: Server, tmp_path: Path, log: Path) -> None:
    """Every request is told: served ones with times and usage, refused ones with the error's code."""
    live = LiveOptions(server.url, key=server.key("ann"), concurrency=2, max_tokens=2)
    seen: list[int] = []
    document = replay_live(_options(tmp_path, log), live, report=lambda done, total: seen.append(done))
    assert document["num_requests"] == 4
    assert seen == [1, 2, 3, 4]
    assert document["errors"] == {"context_length_exceeded": 1}
    assert document["complete"]
    assert document["ttft_ms"]["p50"] > 0
    counts = document["token_counts"]
    assert counts["here"] == counts["server"] > 0, "the server's tokenizer is the replay's"
    assert counts["num_unlike"] == 0
    assert document["reported"]["num_requests"] == 3
    assert document["reported"]["num_cached_tokens"] > 0
    assert {arm["arm"] for arm in document["predicted"]} == set(LIVE_POLICIES.split(","))
    rows = pq.read_table(tmp_path / "live.parquet").to_pylist()
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert "planted" not in str(rows) + json.dumps(document)
    assert str(tmp_path) not in json.dumps(document)


def test_requests_are_sent_at_the_logs_pace(server: Server, tmp_path: Path) -> None:
    """Two seconds of log at four times its speed: nothing leaves before it is due."""
    path = tmp_path / "log.jsonl"
    rows = [{"prompt": f"What costs item {at}?", "timestamp": 1_700_000_000 + at} for at in (0, 1, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    live = LiveOptions(server.url, key=server.key("ann"), speedup=4.0, max_tokens=1)
    assert replay_live(_options(tmp_path, path), live)["errors"] == {}
    sent = [row["sent_s"] for row in pq.read_table(tmp_path / "live.parquet").to_pylist()]
    assert all(moment >= due for moment, due in zip(sent, (0.0, 0.25, 0.5), strict=True))


def test_the_pace_begins_with_the_first_time() -> None:
    """Rows without a time stand first and wait for nothing; then a second of log is half of one."""

    def wait_s(time_s: float | None, *, now_s: float) -> float:
        plain = request(0, [1])
        known = replace(plain, logged=replace(plain.logged, time_s=time_s), time_s=time_s or 0.0)
        return pace.wait_s(known, now_s)

    pace = Pace(2.0)
    assert wait_s(None, now_s=50) == 0
    assert wait_s(1.7e9, now_s=60) == 0
    assert wait_s(1.7e9 + 10, now_s=61) == 4
    assert wait_s(1.7e9 + 20, now_s=80) == 0


def test_one_store_predicts(tmp_path: Path, log: Path) -> None:
    """Of several capacities none is chosen in silence."""
    options = replace(_options(tmp_path, log), capacities_tokens=(1000, 2000))
    with pytest.raises(ConfigError, match="--capacity"):
        replay_live(options, LiveOptions("http://127.0.0.1:9"))


def test_nobody_at_the_address(tmp_path: Path, log: Path) -> None:
    """An error that says so, not a thousand failed requests."""
    with pytest.raises(UnreachableError, match="cannot reach"):
        replay_live(_options(tmp_path, log), LiveOptions("http://127.0.0.1:9"))


def test_agreement_is_per_request() -> None:
    """Predictions wrong both ways do not make up for each other; shares are of each side's own tokens."""
    rows = [
        _row(num_cached=80, **{"predicted:x": 120}),
        _row(num_cached=20, **{"predicted:x": 80}),
        _row(num_cached=None, **{"predicted:x": 0}),
    ]
    document = summarise(rows, ["x"])
    (agreement,) = document["predicted"]
    assert agreement["token_hit_rate"] == document["reported"]["token_hit_rate"] == 0.5
    assert agreement["mean_difference"] == pytest.approx(0.2)
    assert agreement["within_5_percent"] == 0


@pytest.mark.parametrize(
    ("num_messages", "here", "there", "is_unlike"),
    [
        (0, 100, 101, False),  # the token of the beginning
        (0, 100, 90, True),
        (1, 100, 130, False),  # a default system prompt
        (1, 100, 90, True),
        (1, 100, 200, True),
        (20, 1000, 1150, False),
    ],
)
def test_token_counts_are_compared(num_messages: int, here: int, there: int, is_unlike: bool) -> None:
    """A chat template adds a little to a prompt and to each message; what is more is another tokenizer."""
    row = _row(num_messages=num_messages, num_tokens=here, num_prompt_tokens=there, num_cached=None)
    assert summarise([row], [])["token_counts"] == {
        "num_requests": 1,
        "here": here,
        "server": there,
        "num_unlike": int(is_unlike),
    }


def _row(**values: Any) -> dict[str, Any]:
    common = {"error": None, "ttft_s": 0.1, "num_messages": 0, "num_tokens": 200, "num_prompt_tokens": 100}
    return {**common, **values}
