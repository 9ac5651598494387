"""The live replay measures a real server, and sets what it says beside the prediction."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvshare.errors import UpstreamError
from kvshare.replay.arms import parse_arms
from kvshare.replay.live import LIVE_ARMS, LiveOptions, replay_live
from kvshare.replay.live_figures import summarise
from kvshare.replay.options import ReplayOptions
from kvshare.settings import load_settings
from tests.conftest import Server


def _options(tmp_path: Path, log: Path) -> ReplayOptions:
    return ReplayOptions(paths=[log], out=tmp_path, arms=parse_arms(LIVE_ARMS), settings=load_settings())


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
    assert document["ttft_ms"]["p50"] > 0
    assert document["reported"]["num_requests"] == 3
    assert document["reported"]["num_cached_tokens"] > 0
    assert {arm["arm"] for arm in document["predicted"]} == set(LIVE_ARMS.split(","))
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


def test_nobody_at_the_address(tmp_path: Path, log: Path) -> None:
    """An error that says so, not a thousand failed requests."""
    with pytest.raises(UpstreamError, match="does not tell its models"):
        replay_live(_options(tmp_path, log), LiveOptions("http://127.0.0.1:9"))


def test_agreement_is_per_request() -> None:
    """Predictions that are wrong both ways do not make up for each other."""
    row = {"error": None, "ttft_s": 0.1, "num_prompt_tokens": 100}
    rows = [
        {**row, "num_cached": 80, "predicted:x": 60},
        {**row, "num_cached": 20, "predicted:x": 40},
        {**row, "num_cached": None, "predicted:x": 0},
    ]
    document = summarise(rows, ["x"])
    (agreement,) = document["predicted"]
    assert agreement["token_hit_rate"] == document["reported"]["token_hit_rate"] == 0.5
    assert agreement["mean_difference"] == pytest.approx(0.2)
    assert agreement["within_5_percent"] == 0
