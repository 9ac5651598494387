"""`kvshare replay` from its command line: what it refuses, shows and keeps; and Ctrl-C, on real processes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer
from typer.core import TyperGroup

from kvshare.cli import main, replay
from kvshare.cli.views import draw
from kvshare.demo import MODEL_PATH
from kvshare.replay.options import ReplayOptions
from kvshare.replay.policies.base import BatchEmbeddings
from tests.kvshare.cli.conftest import Outcome
from tests.kvshare.replay.report.small_results import results
from tests.kvshare.replay.synthetic import FakeEmbedder
from tests.kvshare.replay.tiny_engine import KEY, TinyEngine, running

TIMEOUT_S = 60
FORM = " ".join(f"fact{number} about thing{number}" for number in range(40))

Kvshare = Callable[..., Outcome]


@pytest.fixture
def kvshare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvshare:
    """Runs the command in this process, in an empty folder: as real, and ten times faster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVSHARE_API_KEY", raising=False)

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["kvshare", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        shown = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), shown.out, shown.err)

    return run


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Four prompts of one form among seven rows that are broken."""
    rows = [json.dumps({"prompt": f"{FORM} for {name}"}) for name in ("Anna", "Bert", "Cid", "Anna")]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join([rows[0], *["{broken"] * 7, *rows[1:]]) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def engine() -> Iterator[TinyEngine]:
    with running(TinyEngine()) as engine:
        yield engine


def _words(outcome: Outcome) -> str:
    """What stands on stdout, whatever the width."""
    return " ".join(outcome.stdout.split())


def _live(engine: TinyEngine, *arguments: object) -> tuple[object, ...]:
    return (
        "replay",
        "log.jsonl",
        "--tokenizer",
        "demo",
        "--engine",
        engine.url,
        "--key",
        KEY,
        "--out",
        "live",
        *arguments,
    )


def _document(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


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
    assert len(_document(tmp_path / "out" / "results.json")["data"]["unreadable"]["lines"]) == 7


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
    done = kvshare(*_live(engine, "--capacity", "10k"))
    assert done.code == 0
    assert "4 requests, 0 failed" in done.stdout
    assert "the server reports that 50.00 %" in _words(done)
    assert "log.jsonl:2 bad_json" in _words(done)
    assert "warning: for 4 of 4 requests the server counts other tokens" in _words(done)
    document = _document(tmp_path / "live" / "live.json")
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
    done = kvshare(*_live(engine, "--key", "wrong"))
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


def test_the_manual_has_every_option() -> None:
    """docs/cli.md lists what `kvshare replay --help` offers."""
    manual = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    section = manual.split("## kvshare replay")[1].split("## ")[0]
    group = typer.main.get_command(replay.app)
    assert isinstance(group, TyperGroup)
    options = [
        name for option in group.commands["run"].params for name in option.opts if name.startswith("--")
    ]
    assert [name for name in options if f"`{name}" not in section] == []


def test_reading_has_its_own_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read so far, without a total; then the replay's bar begins at nothing."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]  # as if it were one
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with replay.progress_bar(hidden=False) as report:
        report(3000, None)
        time.sleep(0.2)  # the bar is drawn ten times a second
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


def _start(tmp_path: Path, *arguments: object) -> subprocess.Popen[str]:
    """Where Ctrl-C works, also if these tests run in the background."""
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from kvshare.cli.main import main; main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _interrupt(process: subprocess.Popen[str], when: Callable[[], bool]) -> Outcome:
    """Ctrl-C as soon as it came so far."""
    deadline = time.monotonic() + TIMEOUT_S
    while not when():
        assert process.poll() is None, "it ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    return Outcome(process.returncode, stdout, stderr)


@pytest.mark.slow
def test_an_interrupted_replay_goes_on(kvshare: Kvshare, tmp_path: Path) -> None:
    """Ctrl-C behind a checkpoint is exit code 130; --resume then ends it."""
    rows = (json.dumps({"prompt": f"question {number} of {FORM}"}) + "\n" for number in range(4000))
    (tmp_path / "log.jsonl").write_text("".join(rows), encoding="utf-8")
    arguments = ("replay", "log.jsonl", "--tokenizer", "demo", "--arms", "prefix,chunks", "--out", "out")
    part = tmp_path / "out" / "checkpoint" / "rows-00000.parquet"
    stopped = _interrupt(_start(tmp_path, *arguments), part.exists)
    assert (stopped.code, stopped.stdout) == (130, "")
    assert stopped.stderr.strip() == "interrupted; continue with --resume"
    assert kvshare(*arguments, "--resume").code == 0
    document = _document(tmp_path / "out" / "results.json")
    assert (document["data"]["num_requests"], document["times"]["resumed"]) == (4000, 1)


@pytest.mark.usefixtures("log")
def test_an_interrupted_live_replay_keeps_what_was_answered(tmp_path: Path) -> None:
    """Three requests were answered, the fourth waits: Ctrl-C writes the three, and nothing of --resume."""
    with running(TinyEngine(max_answers=3)) as engine:
        process = _start(tmp_path, *_live(engine, "--concurrency", 1))
        stopped = _interrupt(process, engine.held.is_set)
    assert stopped.code == 130
    assert "interrupted; the answers until then are in live" in stopped.stderr
    assert "--resume" not in stopped.stderr
    assert "interrupted: 3 requests" in stopped.stdout
    document = _document(tmp_path / "live" / "live.json")
    assert (document["complete"], document["num_requests"]) == (False, 3)
    assert pq.read_table(tmp_path / "live" / "live.parquet").num_rows == 3


@pytest.mark.usefixtures("log")
def test_an_interrupted_live_replay_without_answers_promises_nothing(tmp_path: Path) -> None:
    """Nothing was measured: no files, and no word of going on."""
    with running(TinyEngine(max_answers=0)) as engine:
        stopped = _interrupt(_start(tmp_path, *_live(engine)), engine.held.is_set)
    assert (stopped.code, stopped.stderr.strip()) == (130, "interrupted")
    assert not list((tmp_path / "live").iterdir())
