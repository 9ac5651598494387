"""
Writes the samples of docs/cli.md again: runs their commands against a demo server that it starts, and puts
what they print below them. Samples that need a vLLM, or show an error, stay as they are.

    .venv/bin/python scripts/draw_cli.py
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kvshare.cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
ADDRESS = "http://127.0.0.1:8000"  # in the samples
_HOME = "/home/ann"
_PROMPT = "    $ "
_MOST_COLUMNS = 150
_WRAPPED = 120  # columns: the next line may go on with this one
_START_S = 180.0
_REPORT = (
    "The report of the {place} branch says that sales rose by nine percent in spring and fell in autumn. The "
    "staff asks for a second printer, a new lamp for the hall, and more paper. The manager answers within "
    "{days} days and sends a copy to the main office."
)
# Nothing here is about meaning, and the prompts are too short to save time.
_CONFIG = "index: {dense: false}\ncost: {min_saved_s: -60.0, min_saved_fraction: 0.0}\n"
_STATES = ("ok", "warn", "fail")  # of a check
_EDITS = ("keep", "insert", "delete", "replace")  # lines of an edit script, of which there may be any number
_HEADERS = ("namespace", "tenant", "prompt", "tokens", "edit", "positions", "node", "file")  # of tables
_FILES = {
    "handbook.md": "# Handbook\n\n"
    + "The office opens at nine and closes at five. Keys are at the desk. " * 30,
    "forms.jsonl": "".join(
        json.dumps(row) + "\n"
        for row in 2
        * [
            {
                "label": "intake",
                "messages": [{"role": "user", "content": _REPORT.format(place="far", days=3)}],
            }
        ]
    )
    + "no row\n",
}


@contextmanager
def demo_server(folder: Path) -> Iterator[str]:
    """The address of `kvshare serve` with the forms model and two prompts, one an edit of the other."""
    (folder / "config.yaml").write_text(_CONFIG, encoding="utf-8")
    options = ["--model", "demo", "--port", "0", "--store", "store", "--config", "config.yaml"]
    command = [sys.executable, "-m", "kvshare.cli.main", "serve", *options, "--format", "json"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            ready = ""
            while not ready.endswith("}\n"):
                ready += server.stdout.readline() or _fail("the server did not start")
            url = str(json.loads(ready)["url"])
            for _ in range(3):  # for the rates in `stats`
                _ask(url, _FILES["handbook.md"], kvshare={"mode": "off", "no_store": True})
            for number, (place, days) in enumerate((("north", "ten"), ("west", "six")), start=1):
                _ask(url, _REPORT.format(place=place, days=days))
                _await_nodes(url, number)
            yield url
        finally:
            server.terminate()


def samples() -> dict[str, list[str]]:
    """By the command as the page has it, with N for numbers of prompts: the command, then what it prints."""
    with tempfile.TemporaryDirectory() as name, chdir(name):
        with demo_server(Path(name)) as url:
            for file, text in _FILES.items():
                Path(file).write_text(text, encoding="utf-8")
            second, first = (str(row["id"]) for row in _rows(url))
            commands = [
                f'kvshare explain --url {url} --prompt "{_REPORT.format(place="south", days="two")}"',
                f"kvshare stats --url {url}",
                "kvshare tree --sort hits --depth 2",
                f"kvshare node {second}",
                f"kvshare diff {first} {second} --min-run 4",
                f"kvshare pin {second}",
                f"kvshare unpin {second}",
                f"kvshare evict {second}",
                f"kvshare warm handbook.md forms.jsonl --url {url} --pin",
                "kvshare evict --all",
                "kvshare hash-key --generate",
                "kvshare version",
            ]
            found = {key_of(command.replace(url, ADDRESS)): _run(command, url) for command in commands}
        found["kvshare doctor"] = _run("kvshare doctor", None)
    return found


def key_of(command: str) -> str:
    """The command without what differs from run to run."""
    return re.sub(r"\b\d{6,}\b", "N", re.sub(r'--prompt ".*', "--prompt", command.replace(ADDRESS, "URL")))


def blocks(page: str) -> Iterator[tuple[str, list[str]]]:
    """Of each sample on a page the key, and its lines: the command's and what it prints."""
    sample: list[str] = []
    for line in [*page.splitlines(), "the end"]:
        begins, goes_on = line.startswith(_PROMPT), line.startswith("    ") or not line
        if sample and (begins or not goes_on):
            yield key_of(sample[0][2:]), "\n".join(sample).rstrip().splitlines()
            sample = []
        if begins or (sample and goes_on):
            sample.append(line[4:])


def outline(lines: list[str]) -> list[str]:
    """What a sample shows, without its values: the first word of each line, and of tables their headers."""
    shown = []
    for before, line in pairwise(lines):
        words = line.split()
        if not words or words[0] == "->" or re.search(r"\d", words[0]) or len(before) > _WRAPPED:
            continue
        if words[0] in _EDITS:
            continue
        if words[0] in _STATES:
            shown.append(words[1])
        else:
            shown.append(line.strip() if words[0] in _HEADERS and len(words) > 2 else words[0])
    return [re.sub(r"\b[0-9a-f]{12,}\b", "DIGEST", re.sub(" +", " ", each)) for each in shown]


def redrawn(page: str, found: Mapping[str, list[str]]) -> str:
    """The page with these samples in place of its own."""
    for key, lines in blocks(page):
        if key in found:
            old, new = (
                "\n".join(f"    {line}" if line else "" for line in each) for each in (lines, found[key])
            )
            page = page.replace(old, new, 1)
    return page


def _run(command: str, url: str | None) -> list[str]:
    """The command and the lines that it prints, as if the server were at `ADDRESS`."""
    environment = {} if url is None else {"KVSHARE_URL": url}
    outcome = CliRunner(env={"NO_COLOR": "1", **environment}).invoke(app, shlex.split(command)[1:])
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    printed = outcome.output.rstrip()
    text = f"$ {_shortened(command)}\n{printed}".replace(str(Path.home()), _HOME)
    text = text.replace(url, ADDRESS) if url else text
    return [
        line if len(line) <= _MOST_COLUMNS else f"{line[: _MOST_COLUMNS - 4]} ..."
        for line in text.splitlines()
    ]


def _shortened(command: str) -> str:
    return re.sub(r'(--prompt ".{35}[^ ]*).*', r'\1 ..."', command)


def _ask(url: str, text: str, **settings: object) -> None:
    model = _get(url, "/v1/models")["data"][0]["id"]
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "max_tokens": 4, "messages": messages, **settings}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=_START_S).close()


def _get(url: str, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + path, timeout=_START_S) as response:
        return dict(json.load(response))


def _await_nodes(url: str, number: int) -> None:
    deadline = time.monotonic() + _START_S
    while _get(url, "/admin/stats")["totals"]["num_nodes"] < number:
        assert time.monotonic() < deadline, "the prompt was not stored"
        time.sleep(0.1)


def _rows(url: str) -> list[dict[str, Any]]:
    """The edited prompt, then the one that it was edited from."""
    (root,) = _get(url, "/admin/tree")["roots"]
    (child,) = root["children"]
    return [child, root]


def _fail(problem: str) -> str:
    raise RuntimeError(problem)


if __name__ == "__main__":
    PAGE.write_text(redrawn(PAGE.read_text(encoding="utf-8"), samples()), encoding="utf-8")
