"""From files to files: the same twice, the same when interrupted, and without a word of the prompts."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from kvshare.cli.main import app
from kvshare.errors import LogError
from kvshare.replay.diff import diff
from kvshare.replay.options import ReplayOptions
from kvshare.replay.policies import parse_policies
from kvshare.replay.rows import SCHEMA
from kvshare.replay.run import replay
from kvshare.settings import load_settings
from tests.kvshare.replay.synthetic import FakeEmbedder

PLANTED = "xylophonic"  # stands in every prompt, in names, and nowhere else
ARMS = "nothing,prefix,chunks,response,kvshare,kvshare-fingerprints-open,oracle"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path)


def write_log(folder: Path) -> Path:
    """Forty requests of twenty users, half of them edits of one form; one row is broken."""
    form = " ".join(f"line {i} of the {PLANTED} form says word{i * 7 % 13}." for i in range(40))
    path = folder / "log.jsonl"
    rows = []
    for number in range(40):
        if number % 2:
            content = form.replace("line 20 of", f"entry {number} in")
        else:
            content = " ".join(f"{PLANTED}{number} text{number * i % 17}" for i in range(60))
        rows.append(
            {
                "messages": [{"role": "user", "content": content}],
                "user": f"{PLANTED}-{number % 20}",
                "timestamp": 1000 + number,
            }
        )
    lines = [json.dumps(row) for row in rows]
    lines.insert(7, "{broken")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def options(log: Path, out: Path, arms: str = ARMS, **changes: Any) -> ReplayOptions:
    out.mkdir(exist_ok=True)
    return ReplayOptions(
        paths=[log],
        out=out,
        policies=parse_policies(arms),
        settings=load_settings(),
        tokenizer="demo",
        capacities_tokens=(2000,),
        checkpoint_every=8,
        **changes,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a run that nothing interrupts, over such a log."""
    folder = tmp_path_factory.mktemp("whole")
    replay(options(write_log(folder), folder / "out"), embedder=FakeEmbedder())
    return folder / "out"


def timeless(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
    del document["times"]
    return document


class Interrupt:
    """Presses Ctrl-C when so many requests are done."""

    def __init__(self, after: int) -> None:
        self._after = after

    def __call__(self, done: int, total: int | None) -> None:
        if done == self._after:
            raise KeyboardInterrupt


def test_two_runs_give_the_same_results(whole: Path, log: Path, tmp_path: Path) -> None:
    """Times aside, byte for byte."""
    replay(options(log, tmp_path / "again"), embedder=FakeEmbedder())
    assert timeless(tmp_path / "again") == timeless(whole)


@pytest.mark.parametrize("after", [5, 39])
def test_a_resumed_run_gives_the_same_results(whole: Path, log: Path, tmp_path: Path, after: int) -> None:
    """Interrupted before and after the first checkpoint, the rows and figures are those of a whole run."""
    interrupted = options(log, tmp_path / "interrupted")
    with pytest.raises(KeyboardInterrupt):
        replay(interrupted, embedder=FakeEmbedder(), report=Interrupt(after))
    assert not (interrupted.out / "results.json").exists()
    document = replay(interrupted, resume=True, embedder=FakeEmbedder())
    assert document["times"]["resumed"] == (1 if after == 39 else 0)
    assert timeless(interrupted.out) == timeless(whole)
    clocks = {"lookup_s", "plan_s", "observe_s"}
    rows = [
        pq.read_table(out / "requests.parquet").drop_columns(list(clocks)).to_pylist()
        for out in (interrupted.out, whole)
    ]
    assert rows[0] == rows[1]
    assert not (interrupted.out / "checkpoint").exists()


def test_a_log_that_names_no_users_claims_nothing_of_them(tmp_path: Path) -> None:
    """What comes from another session is of unknown origin; who asked is part of the data's hash."""
    prompt = " ".join(f"word{number}" for number in range(200))
    hashes = set()
    expected = {"aab": {"none": 1, "same_user": 1, "unknown": 1}, "abb": {"none": 1, "unknown": 2}}
    for sessions, counts in expected.items():
        log = tmp_path / f"{sessions}.jsonl"
        lines = [json.dumps({"prompt": prompt, "session_id": session}) for session in sessions]
        log.write_text("\n".join(lines), encoding="utf-8")
        document = replay(options(log, tmp_path / sessions, "prefix"))
        by = document["arms"][0]["by"]
        assert {key: figures["num_requests"] for key, figures in by["origin"].items()} == counts
        assert by["turn"]["first"]["num_requests"] == 2
        users = pq.read_table(tmp_path / sessions / "requests.parquet")["user"].to_pylist()
        assert set(users) == {None}
        assert document["data"]["num_users"] == 0
        hashes.add(document["data"]["sha256"])
    assert len(hashes) == 2


def test_resuming_with_other_options_is_refused(log: Path, tmp_path: Path) -> None:
    """A checkpoint belongs to its options and files."""
    with pytest.raises(KeyboardInterrupt):
        replay(options(log, tmp_path / "out", "prefix"), report=Interrupt(39))
    with pytest.raises(LogError, match="other options"):
        replay(options(log, tmp_path / "out", "prefix,chunks"), resume=True)


def test_results_hold_what_the_schema_says(whole: Path) -> None:
    """One row a request and store; the broken row is told by its line; arms agree with their rows."""
    document = json.loads((whole / "results.json").read_text(encoding="utf-8"))
    table = pq.read_table(whole / "requests.parquet")
    assert table.column_names == SCHEMA.names
    num_stores = 1 + 2 * 6
    assert table.num_rows == 40 * num_stores
    assert len(document["arms"]) == num_stores
    assert document["data"]["num_requests"] == 40
    assert document["data"]["num_users"] == 20
    assert [line["line"] for line in document["data"]["unreadable"]["lines"]] == [8]
    for arm in document["arms"]:
        assert sum(arm["coverage_histogram"]) == 40
        assert sum(stretch[3] for stretch in arm["series"]) == arm["num_hit_tokens"]
        for group in arm["by"].values():
            assert sum(figures["num_hit_tokens"] for figures in group.values()) == arm["num_hit_tokens"]
    rates = {arm["label"]: arm["token_hit_rate"] for arm in document["arms"]}
    assert 0 == rates["nothing"] < rates["prefix"] < rates["kvshare-fingerprints-open"] <= rates["oracle"]
    assert rates["kvshare"] < rates["kvshare-fingerprints-open"]
    for waterfall in document["waterfall"]:
        *steps, hit = (step["num_tokens"] for step in waterfall["steps"])
        assert sum(steps) == hit
    assert document["similarity"]["overlap"] == "oracle"


def test_what_is_saved_net_pays_for_the_embedding(log: Path, tmp_path: Path) -> None:
    """The response cache embeds every request: each costs what a text took on average."""
    document = replay(options(log, tmp_path / "out", "response"), embedder=FakeEmbedder())
    times, embedding = document["times"]["arms"]["response"], document["times"]["embedding"]
    spent_s = 40 * (times["lookup_ms"]["mean"] / 1000 + embedding["seconds"] / embedding["num_texts"])
    saved_s = document["arms"][0]["ttft_saved_s"]["total"]
    assert times["ttft_saved_net_s"]["total"] == pytest.approx(saved_s - spent_s, abs=1e-6)


def test_no_text_in_any_file(log: Path, tmp_path: Path) -> None:
    """Not of prompts, not of users, not where the log was: neither in the results nor in a checkpoint."""
    with pytest.raises(KeyboardInterrupt):
        replay(options(log, tmp_path / "out"), embedder=FakeEmbedder(), report=Interrupt(39))
    _assert_nothing_told(tmp_path)
    replay(options(log, tmp_path / "out"), resume=True, embedder=FakeEmbedder())
    _assert_nothing_told(tmp_path)


def _assert_nothing_told(tmp_path: Path) -> None:
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert files
    for path in files:
        payload = path.read_bytes()
        if path.suffix == ".parquet":
            payload = str(pq.read_table(path).to_pydict()).encode()
        assert PLANTED.encode() not in payload
        assert b"word3" not in payload
        assert str(tmp_path).encode() not in payload


def test_limit_takes_the_first_requests(log: Path, tmp_path: Path) -> None:
    """And the seen total is told to the progress bar."""
    seen: list[tuple[int, int | None]] = []

    def report(done: int, total: int | None) -> None:
        seen.append((done, total))

    document = replay(options(log, tmp_path / "out", "prefix", limit=10), report=report)
    assert document["data"]["num_requests"] == 10
    assert seen[-1] == (10, 10)


def test_diff_finds_a_difference_and_none(log: Path, tmp_path: Path) -> None:
    """A run against itself differs by nothing; a smaller store loses hits, with an interval that says so."""
    for name, spec in (("a", "oracle,prefix"), ("b", "oracle:min_run=16,prefix")):
        replay(options(log, tmp_path / name, spec))
    same = diff(tmp_path / "a", tmp_path / "a", resamples=200)
    assert all(f["difference"] == f["low"] == f["high"] == 0 for arm in same["arms"] for f in arm["figures"])
    other = diff(tmp_path / "a", tmp_path / "b", resamples=200)
    assert other["only_in_a"] == ["oracle", "oracle @ 2,000 tokens"]
    assert [arm["label"] for arm in other["arms"]] == ["prefix", "prefix @ 2,000 tokens"]
    _rename_oracle(tmp_path / "b", log)
    found = diff(tmp_path / "a", tmp_path / "b", resamples=200)
    (oracle,) = (arm for arm in found["arms"] if arm["label"] == "oracle")
    rate = oracle["figures"][0]
    assert rate["name"] == "token_hit_rate"
    assert rate["low"] <= rate["difference"] <= rate["high"] < 0
    assert rate["differs"]


def _rename_oracle(out: Path, log: Path) -> None:
    """The prefix arm's rows under the oracle's name: surely fewer hits."""
    path = out / "requests.parquet"
    table = pq.read_table(path)
    names = ["oracle" if name == "prefix" else "other" for name in table.column("arm").to_pylist()]
    pq.write_table(table.set_column(table.column_names.index("arm"), "arm", [names]), path)


def test_diff_of_other_logs_is_refused(log: Path, tmp_path: Path) -> None:
    """Requests that are not the same cannot be paired."""
    replay(options(log, tmp_path / "a", "prefix"))
    replay(options(log, tmp_path / "b", "prefix", limit=20))
    with pytest.raises(LogError, match="different logs"):
        diff(tmp_path / "a", tmp_path / "b")


def test_command_line(log: Path, tmp_path: Path) -> None:
    """`kvshare replay FILE` runs, `--json` is JSON alone, `replay diff` compares."""
    runner, out = CliRunner(), str(tmp_path / "out")
    args = [
        "replay",
        str(log),
        "--tokenizer",
        "demo",
        "--arms",
        "prefix,oracle",
        "--out",
        out,
        "--bytes-per-token",
        "100",
    ]
    args += ["--capacity", "1k,0.1MB"]
    done = runner.invoke(app, [*args, "--json"])
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert document["config"]["capacities_tokens"] == [1000]
    shown = runner.invoke(app, args)
    assert shown.exit_code == 0
    assert "oracle" in shown.stdout
    compared = runner.invoke(app, ["replay", "diff", out, out, "--json", "--resamples", "10"])
    assert json.loads(compared.stdout)["kind"] == "replay-diff"
    assert runner.invoke(app, [*args, "--capacity", "many"]).exit_code == 2


@pytest.mark.parametrize(("given", "expected"), [((), [131_072]), (("--capacity", "none"), [])])
def test_a_finite_store_unless_none_is_wanted(
    log: Path, tmp_path: Path, given: tuple[str, ...], expected: list[int]
) -> None:
    """Sixteen gibibytes of a Llama-3-8B's KV, beside the infinite store."""
    args = [
        "replay",
        str(log),
        "--tokenizer",
        "demo",
        "--arms",
        "prefix",
        "--out",
        str(tmp_path / "out"),
        "--json",
        *given,
    ]
    document = json.loads(CliRunner().invoke(app, args).stdout)
    assert document["config"]["capacities_tokens"] == expected
    assert [arm["capacity_tokens"] for arm in document["arms"]] == [None, *expected]
