"""The report in a real browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvshare.cli.main import app
from kvshare.replay.policies import parse_policies
from kvshare.replay.report import write_report
from tests.kvshare.replay.report.small_results import results, write_results

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


# Opens all folds, and counts what is wider than its place: tables first, then texts in plots.
MEASURE = """<script>
for (const fold of document.querySelectorAll("details")) fold.open = true;
const tables = [...document.querySelectorAll(".scroll")].filter(it => it.scrollWidth > it.clientWidth);
const cut = [...document.querySelectorAll("svg")].flatMap(plot => [...plot.querySelectorAll("text")].filter(
    text => text.getBoundingClientRect().right > plot.getBoundingClientRect().right + 1));
document.title = `${tables.length} ${cut.length}`;
</script>"""


def open_page(page: Path, profile: Path, *, width: int = 1400) -> tuple[str, str]:
    """What the browser made of the page, and what it wrote on its console."""
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        f"--window-size={width},1000",
        f"--user-data-dir={profile}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of ordinary results."""
    return write_report(write_results(tmp_path_factory.mktemp("run"), results(60), 60))


@pytest.fixture(scope="module")
def widest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with the longest names of policies, which measures itself when it is opened."""
    names = [spec.text for spec in parse_policies("all")]
    stores = [(name, name.split("-")[0].split(":")[0], None) for name in names]
    document = results(60, stores=[*stores, ("prefix", "prefix", 1000), ("kvshare-open", "kvshare", 1000)])
    page = write_report(write_results(tmp_path_factory.mktemp("run"), document))
    text = re.sub(r"<meta http-equiv.*?>", "", page.read_text(encoding="utf-8"))
    page.write_text(text.replace("</main>", f"</main>{MEASURE}"), encoding="utf-8")
    return page


def test_a_browser_shows_the_report_and_complains_of_nothing(ordinary: Path, tmp_path: Path) -> None:
    """All plots are there and the console is empty."""
    shown, console = open_page(ordinary, tmp_path / "profile")
    assert console == ""
    assert shown.count("<svg") == 9 + 4, "four plots have one of all policies behind a fold"
    assert "Sharing pays on this log" in shown


@pytest.mark.parametrize("width", [1400, 800])
def test_tables_fit_and_legends_are_uncut(widest: Path, tmp_path: Path, width: int) -> None:
    """Also those behind folds."""
    shown, _ = open_page(widest, tmp_path / "profile", width=width)
    assert "<title>0 0</title>" in shown


def test_the_report_of_a_real_replay(tmp_path: Path) -> None:
    """Of a workload from the package, by the command line: every plot but the two of meaning."""
    log, out = str(tmp_path / "template.jsonl"), tmp_path / "out"
    for args in (
        ["workload", "template", "--requests", "60", "--out", log],
        ["replay", log, "--tokenizer", "demo", "--arms", "fast", "--capacity", "2k,8k", "--out", str(out)],
    ):
        assert CliRunner().invoke(app, args).exit_code == 0
    shown, console = open_page(out / "report.html", tmp_path / "profile")
    assert console == ""
    assert shown.count("<svg") == 7 + 4
    assert "Sharing pays on this log" in shown


def test_the_browser_would_have_complained(ordinary: Path, tmp_path: Path) -> None:
    """The console is really read, and the page's policy keeps scripts and addresses out."""
    text = ordinary.read_text(encoding="utf-8")
    page = tmp_path / "report.html"
    page.write_text(text.replace("</main>", "<script>document.title='run'</script></main>"), encoding="utf-8")
    shown, console = open_page(page, tmp_path / "profile")
    assert "Content Security Policy" in console
    assert "<title>run</title>" not in shown
