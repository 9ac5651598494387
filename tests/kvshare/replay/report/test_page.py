"""The page: it reads right, lets nothing through unescaped, and says nothing of what was asked."""

import json
import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Mapping
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvshare.cli.main import app
from kvshare.demo import MODEL_PATH
from kvshare.errors import LogError
from kvshare.replay.report import render, write_report
from kvshare.replay.report.picture import Picture
from kvshare.replay.report.plots import draw
from kvshare.replay.report.reading import parse_report, read_report
from kvshare.replay.results import RESULTS_FILE
from tests.kvshare.replay.report.small_results import results, write_results
from tests.kvshare.replay.report.test_plots import CASES, drawn

VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
PLANTED = "xylophonic"


class Balanced(HTMLParser):
    """Fails on a tag that is not closed, a script, or an address to load from."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "iframe", "object")
        for name, value in attrs:
            assert not name.startswith("on"), name
            assert name not in ("src", "href") or str(value).startswith(("#", "data:,")), value
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def rendered(document: dict[str, Any], pictures: Mapping[str, Picture | None] | None = None) -> str:
    """Without plots unless they are given."""
    page = render(parse_report(document), defaultdict(lambda: None) if pictures is None else pictures)
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return page


def summary(document: dict[str, Any]) -> tuple[str, str]:
    """The headline, and the sentences below it."""
    found = re.search(
        r'class="headline">(.*?)</p>.*?</div>\s*(<ul>.*?</ul>)?\s*<nav>', rendered(document), re.DOTALL
    )
    assert found is not None
    headline, sentences = (text_of(part or "") for part in found.groups())
    return headline, sentences


def text_of(html: str) -> str:
    """As a browser shows it."""
    return " ".join(unescape(re.sub(r"<.*?>", "", html)).split())


@pytest.mark.parametrize("case", CASES)
def test_the_page_is_balanced_and_has_no_number_that_is_none(case: str) -> None:
    """Even where hardly anything is known; what stands in the configuration stands there as it is."""
    page = rendered(CASES[case], drawn(case)).split('id="run"')[0]
    assert not re.search(r"\b(nan|inf|None)\b", page.split("</style>")[1])


def test_names_of_files_arms_and_languages_are_text() -> None:
    """A log called <script> runs nothing."""
    evil = '<script>alert("1")</script>'
    document = json.loads(json.dumps(results(20)).replace("kvshare-open", json.dumps(evil)[1:-1]))
    document["data"]["files"][0]["name"] = evil
    document["data"]["unreadable"] = {
        "num_rows": 2,
        "reasons": {evil: 2},
        "lines": [{"source": evil, "line": 3, "reason": evil}],
    }
    document["config"]["note"] = document["versions"]["numpy"] = evil
    for arm in document["arms"]:
        arm["by"]["language"][evil] = arm["by"]["language"]["English"]
    page = rendered(document, draw(parse_report(document)))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_drawn_has_a_reason(case: str) -> None:
    """For each plot its picture, or why there is none."""
    pictures = drawn(case)
    page = rendered(CASES[case], pictures)
    num_missing = list(pictures.values()).count(None)
    folded = [name for name in pictures if name.endswith("-all")]
    assert page.count("<figure>") == len(pictures) - len(folded)
    assert page.count("<svg") == len(pictures) - num_missing
    assert len(re.findall(r"Not drawn: \w.*\w\.</p>", page)) == page.count("<figure>") - sum(
        pictures[name] is not None for name in pictures.keys() - folded
    )


def test_the_summary_says_what_is_gained_and_where_not() -> None:
    """Over prefix caching, beside the others, and the groups that gain nothing."""
    headline, told = summary(results(60))
    assert headline == (
        "Sharing pays on this log: 28.0 % of the prompt tokens are not computed, "
        "16.0 % with a prefix cache (+12.0 points)."
    )
    assert "It does not pay, compared with a prefix cache, for " in told
    assert "first turns (+0.0 points, 50 % of the tokens)." in told
    assert "KVShare reuses 70.0 % of these." in told
    assert "would answer 10 requests. In 5 of them (50.0 %) the stored prompt has other words" in told


def test_a_log_without_users_is_called_one() -> None:
    """Where it is not known whose the tokens were, nobody is called another user."""
    document = json.loads(json.dumps(results(60)).replace('"same_user"', '"unknown"'))
    document["data"]["num_users"] = 0
    told = summary(document)[1]
    assert "does not name users" in told
    assert "another user" not in told
    page = rendered(document)
    assert "users not named," in page
    assert "of another conversation, users not named" in page


def test_the_summary_admits_when_there_is_little() -> None:
    """No gain is told as no gain; no log as no log."""
    assert "adds next to nothing" in summary(results(40, hit=0.0))[0]
    assert "no request" in summary(results(0))[0]
    only_prefix = results(10, stores=(("prefix", "prefix", None),))
    assert summary(only_prefix) == ("KVShare was not replayed. The other policies are below.", "")


def test_four_policies_are_shown_and_the_others_folded() -> None:
    """Prefix, chunks, KVShare and the oracle; all others are there, behind a fold."""
    document = results(20)
    assert [one.arm for one in parse_report(document).main] == ["prefix", "chunks", "kvshare", "oracle"]
    section = rendered(document).split('id="policies"')[1].split("</section>")[0]
    shown, folded = section.split("<details>")[:2]
    assert [name for name in ("nothing", "response", "kvshare-open") if f">{name}<" in shown] == []
    assert all(f">{name}<" in folded for name in ("nothing", "response", "kvshare-open"))
    few = [("nothing", "nothing", None), ("response", "response", None), ("prefix", "prefix", None)]
    assert [one.arm for one in parse_report(results(4, stores=few)).main] == ["nothing", "response", "prefix"]


def test_a_store_that_loses_nothing_is_said_in_a_sentence() -> None:
    """Instead of a table that repeats the one before."""
    both = [("prefix", "prefix", None), ("prefix", "prefix", 1000)]
    assert "These stores lose nothing" not in rendered(results(20, stores=both))
    document = results(20, stores=both)
    document["arms"][1] |= {name: document["arms"][0][name] for name in ("num_hit_tokens", "token_hit_rate")}
    assert "These stores lose nothing" in rendered(document)


def command_of(page: str) -> list[str]:
    """The command in a page that repeats its run, as a shell would take it apart."""
    found = re.search(r'<pre class="wrap">(.*?)</pre>', page, re.DOTALL)
    assert found is not None
    return shlex.split(unescape(found[1]))


def test_the_command_is_quoted_and_without_folders() -> None:
    """Also that of older results, which have only the tokenizer's name."""
    document = results(4)
    document["data"]["files"][0]["name"] = "my log.jsonl"
    document["config"] |= {"capacities_tokens": [1000], "limit": 4, "format": None}
    for tokenizer, given in (
        ({"name": "my tokenizer"}, ["--tokenizer", "my tokenizer"]),
        ({"name": "kvshare-demo"}, ["--tokenizer", "demo"]),
        ({"name": "Qwen3-8B", "option": "Qwen/Qwen3-8B"}, ["--tokenizer", "Qwen/Qwen3-8B"]),
        ({"name": "smollm2-135m-instruct", "option": None}, []),
    ):
        document["config"]["tokenizer"] = tokenizer
        command = ["kvshare", "replay", "my log.jsonl", "--arms", ",".join(document["config"]["arms"])]
        command += ["--capacity", "1000", "--prefill-tokens-per-s", "1000.0", "--limit", "4", "--seed", "0"]
        assert command_of(rendered(document)) == command + given


def test_the_command_repeats_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where the log lies, it gives the same results; the tokenizer was a folder somewhere else."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"line {number % 3} of a form, entry {number}"} for number in range(12)]
    Path("log.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    shutil.copy(MODEL_PATH / "tokenizer.json", "tokenizer.json")
    given = ["replay", "log.jsonl", "--tokenizer", str(Path("tokenizer.json").resolve()), "--limit", "9"]
    given += ["--arms", "prefix:block_size=4,oracle", "--capacity", "none", "--out", "a"]
    assert CliRunner().invoke(app, given).exit_code == 0
    _, *again = command_of(Path("a", "report.html").read_text(encoding="utf-8"))
    assert str(tmp_path) not in " ".join(again)
    assert CliRunner().invoke(app, [*again, "--out", "b"]).exit_code == 0
    first, second = (json.loads(Path(out, RESULTS_FILE).read_text(encoding="utf-8")) for out in "ab")
    assert {**first, "times": None} == {**second, "times": None}


def test_a_report_has_a_picture_for_each_plot(tmp_path: Path) -> None:
    """PNGs beside the page; one that is no longer drawn goes away."""
    folder = write_results(tmp_path / "run", results(60), 60)
    page = write_report(folder)
    names = {path.stem for path in folder.glob("*.png")}
    assert page == folder / "report.html"
    assert names == set(drawn("ordinary"))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))
    write_results(folder, results(60, similarity=None))
    write_report(folder)
    assert names - {path.stem for path in folder.glob("*.png")} == {"similarity", "similarity-points"}


def test_single_requests_come_from_the_parquet_file(tmp_path: Path) -> None:
    """Distance of the response cache, overlap of the oracle; the first request has no earlier one."""
    points = read_report(write_results(tmp_path, results(60), 60)).points
    assert len(points) == 59
    assert points[0] == pytest.approx((0.1, 0.8))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"kind": "replay-live"}', '{"kind": "replay"}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    """Not a replay's results, or of another schema."""
    (tmp_path / RESULTS_FILE).write_text(content)
    with pytest.raises(LogError):
        write_report(tmp_path)


def test_no_word_of_the_prompts_is_in_the_report(tmp_path: Path) -> None:
    """A word that stands in every prompt, user and conversation stands nowhere in page or pictures."""
    log = tmp_path / "log.jsonl"
    form = " ".join(f"line {i} of the {PLANTED} form" for i in range(30))
    rows = [
        {"messages": [{"role": "user", "content": f"{form} {number}"}], "user": f"{PLANTED}-{number}"}
        for number in range(6)
    ]
    log.write_text("\n".join(json.dumps(row) for row in rows) + "\n{broken " + PLANTED + "\n")
    out = tmp_path / "out"
    arms = "prefix,kvshare-fingerprints-open,oracle"
    done = CliRunner().invoke(
        app, ["replay", str(log), "--tokenizer", "demo", "--arms", arms, "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "log.jsonl:7" in page
    assert all(PLANTED.encode() not in path.read_bytes() for path in out.iterdir() if path.is_file())
    assert str(tmp_path) not in page
