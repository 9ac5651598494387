"""`kvshare replay` from its command line: what it refuses, shows and keeps; and Ctrl-C, on real processes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvshare.cli import replay
from kvshare.cli.views import draw
from kvshare.demo import MODEL_PATH
from kvshare.replay.options import ReplayOptions
from kvshare.replay.policies.base import BatchEmbeddings
from tests.kvshare.cli.conftest import Kvshare
from tests.kvshare.cli.live_replays import FORM, document_at, live_command
from tests.kvshare.cli.outcome import Outcome
from tests.kvshare.cli.served import eventually
from tests.kvshare.replay.report.small_results import results
from tests.kvshare.replay.synthetic import FakeEmbedder
from tests.kvshare.replay.tiny_engine import KEY, TinyEngine


def _words(outcome: Outcome) -> str:
    """What stands on stdout, whatever the width."""
    return " ".join(outcome.stdout.split())


@pytest.mark.usefixtures("log")
def test_a_replay_is_written_and_shown(kvshare: Kvshare, tmp_path: Path) -> None:
    """Policies, verdict and the report's path; the first unreadable rows by file and line."""
    done = kvshare("replay", "log.jsonl", "--tokenizer", "demo", "--arms", "prefix,oracle", "--out", "out")
    assert done.code == 0
    assert "not computed" in done.stdout
    assert "2 more rows, by policy and store, are in the report." in done.stdout
    assert "KVShare was not replayed." in done.stdout
    assert "7 rows could not be read:" in done.stdout
    assert "log.jsonl:2  bad_json" in done.stdout
    assert "log.jsonl:7" not in done.stdout
    assert "and 2 more" in done.stdout
    assert done.stderr.splitlines()[-1] == f"report: {Path('out', 'report.html')}"
    assert len(document_at(tmp_path / "out" / "results.json")["data"]["unreadable"]["lines"]) == 7


def test_the_tables_fit_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """With the longest names of policies, none of which is cut."""
    longest = "kvshare-fingerprints-open:max_distance=x"
    names = ("prefix", "kvshare-semantic-open", longest, "oracle")
    document = results(60, stores=[(name, name.split("-")[0], None) for name in names])
    document["data"]["num_answer_tokens"] = 0
    document["times"]["requests_per_s"] = 12.0
    draw("replay", document, width=80)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "\u2026" not in shown
    figures = re.compile(r"[\d.,]+|%|ms|kB")
    assert longest in "".join(word for word in shown.split() if not figures.fullmatch(word))


@pytest.mark.usefixtures("log")
def test_diff_is_shown(kvshare: Kvshare) -> None:
    """A table an arm, with intervals; arms of one run alone are named."""
    for out, arms in (("a", "prefix"), ("b", "prefix,oracle")):
        assert kvshare("replay", "log.jsonl", "--tokenizer", "demo", "--arms", arms, "--out", out).code == 0
    done = kvshare("replay", "diff", "a", "b", "--resamples", 10)
    assert done.code == 0
    assert "token hit rate" in done.stdout
    assert "+0.00 to +0.00" in done.stdout
    assert "only in b: oracle" in done.stdout


@pytest.mark.usefixtures("log")
def test_paper_is_shown(kvshare: Kvshare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both figures' numbers, and the rows that could not be read."""
    monkeypatch.setattr(ReplayOptions, "embeddings", lambda *_: BatchEmbeddings(FakeEmbedder()))
    done = kvshare(
        "replay", "log.jsonl", "--tokenizer", "demo", "--paper", "--arms", "prefix", "--out", "paper"
    )
    assert done.code == 0
    assert "4 first prompts: 25.00 % have an identical earlier one" in _words(done)
    assert "log.jsonl:2 bad_json" in _words(done)
    assert (tmp_path / "paper" / "figure-4.svg").exists()


@pytest.mark.usefixtures("log")
def test_live_is_shown(kvshare: Kvshare, engine: TinyEngine, tmp_path: Path) -> None:
    """What the server says beside the predictions, with a warning where it counts other tokens."""
    done = kvshare(*live_command(engine, "--capacity", "10k"))
    assert done.code == 0
    assert "4 requests, 0 failed" in done.stdout
    assert "the server reports that 50.00 %" in _words(done)
    assert "log.jsonl:2 bad_json" in _words(done)
    assert "warning: for 4 of 4 requests the server counts other tokens" in _words(done)
    document = document_at(tmp_path / "live" / "live.json")
    assert document["complete"]
    config = document["config"]
    assert (config["capacities_tokens"], config["embedder"]) == ([10_000], None)
    assert {"bytes_per_token", "prefill_tokens_per_s", "settings", "concurrency"} <= config.keys()


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--paper", "--engine", "http://x"), "cannot be used together with --engine"),
        (("--paper", "--resume"), "cannot be used with --paper or --engine"),
        (("--engine", "http://x", "--resume"), "cannot be used with --paper or --engine"),
        (("--paper", "--capacity", "1k"), "cannot be used with --paper"),
        (("--engine", "http://x", "--capacity", "1k,2k"), "expected one store with --engine"),
        (("--engine", "localhost:8000"), "expected http://host:port"),
        (("--out", "log.jsonl"), "log.jsonl: is not a folder"),
        (("--out", "log.jsonl/sub"), "log.jsonl/sub: "),
        (("--arms", "quick"), "fast, all"),
    ],
)
def test_wrong_usage_is_told(kvshare: Kvshare, arguments: tuple[str, ...], told: str) -> None:
    """Nothing is ignored, nothing ends in a traceback: exit code 2, and a line that says what is wrong."""
    done = kvshare("replay", "log.jsonl", "--tokenizer", "demo", *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert told in done.stderr


@pytest.mark.parametrize("mode", [[], ["--paper"], ["--engine", "http://127.0.0.1:9"]])
def test_a_log_without_requests_fails_and_writes_nothing(
    kvshare: Kvshare, tmp_path: Path, mode: list[str]
) -> None:
    """How many rows it has and why none was read, before anything is asked; not a report of zeros."""
    (tmp_path / "log.jsonl").write_text('{"conversations": null}\n' * 2, encoding="utf-8")
    done = kvshare("replay", "log.jsonl", "--tokenizer", "demo", "--out", "out", *mode)
    assert (done.code, done.stdout) == (1, "")
    assert "log.jsonl: none of its 2 rows holds a request" in done.stderr
    assert "missing_field 2" in done.stderr
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.usefixtures("log")
def test_a_wrong_key_is_told(kvshare: Kvshare, engine: TinyEngine) -> None:
    """With the address, the status, and what to do."""
    done = kvshare(*live_command(engine, "--key", "wrong"))
    assert done.code == 1
    assert f"{engine.url}/v1/models: no model found: HTTP status 401" in done.stderr
    assert "--key" in done.stderr


@pytest.mark.usefixtures("log")
def test_an_engine_that_is_not_there_is_told(kvshare: Kvshare) -> None:
    """The exit code of every command that finds nobody at its URL."""
    done = kvshare("replay", "log.jsonl", "--tokenizer", "demo", "--engine", "http://127.0.0.1:9")
    assert done.code == 3
    assert "cannot reach http://127.0.0.1:9" in done.stderr


def test_diff_of_no_results_is_told(kvshare: Kvshare) -> None:
    """The folder as it was given, and what was expected there."""
    done = kvshare("replay", "diff", ".", "x")
    assert done.code == 1
    assert ".: results.json cannot be read" in done.stderr
    assert "kvshare replay --out" in done.stderr


def test_a_replay_imports_what_it_needs(tmp_path: Path) -> None:
    """With a tokenizer.json and no embedding neither torch nor transformers, which take seconds."""
    rows = [json.dumps({"prompt": f"{FORM} for {name}"}) for name in ("Anna", "Bert")]
    (tmp_path / "log.jsonl").write_text("\n".join(rows), encoding="utf-8")
    options = ["--tokenizer", str(MODEL_PATH / "tokenizer.json"), "--arms", "fast", "--json"]
    program = (
        "import sys; from kvshare.cli.main import app;"
        f"app(['replay', 'log.jsonl', *{options}], standalone_mode=False);"
        "sys.exit(f'imported: {found}' if (found := {'torch', 'transformers'} & sys.modules.keys()) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "replay" / "report.html").exists()


def test_help_shows_the_options(kvshare: Kvshare) -> None:
    """Of the command that need not be named, and the name of the other one."""
    done = kvshare("replay", "--help")
    assert done.code == 0
    assert "kvshare replay [OPTIONS] " in done.stdout
    assert "--capacity" in done.stdout
    assert "kvshare replay diff" in _words(done)


def test_reading_has_its_own_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read so far, without a total; then the replay's bar begins at nothing."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]  # as if it were one
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with replay.progress_bar(hidden=False) as report:
        report(3000, None)
        eventually(lambda: "3000/?" in terminal.getvalue())  # the bar is drawn ten times a second
        report(1, 50)
    shown = terminal.getvalue()
    assert "reading" in shown
    assert "3000/?" in shown
    assert "replaying" in shown
    assert " 1/50" in shown


@pytest.mark.parametrize("mode", ["plain", "paper", "live"])
def test_what_was_read_is_reported(
    kvshare: Kvshare, engine: TinyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Before the first request is replayed, in all three modes."""
    rows = (json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(1500))
    (tmp_path / "log.jsonl").write_text("".join(rows), encoding="utf-8")
    seen: list[tuple[int, int | None]] = []
    bar = nullcontext(lambda done, total: seen.append((done, total)))
    monkeypatch.setattr(replay, "progress_bar", lambda *, hidden: bar)
    monkeypatch.setattr(ReplayOptions, "embeddings", lambda *_: BatchEmbeddings(FakeEmbedder()))
    more = {"plain": (), "paper": ("--paper",), "live": ("--engine", engine.url, "--key", KEY)}
    assert (
        kvshare(
            "replay", "log.jsonl", "--tokenizer", "demo", "--arms", "prefix", "--limit", 3, *more[mode]
        ).code
        == 0
    )
    assert seen[0] == (1000, None)
    assert all(total is not None for _, total in seen[1:])
