"""
Runs every replay that docs/replay.md quotes and prints its tables; documents go to docs/measured/replay/.

    .venv/bin/python scripts/replay_logs.py DATA OUT [--gates | --stores] [NAME ...] > tables.md

With --gates the arms differ in what KVShare refuses, with --stores in how much they may keep. DATA has the
logs in the layout that replay_logs.yaml names, which also says how tables are made; OUT gets the workloads, a
tokenizer and each run's folder with its report. A document here is a run's results.json without what only its
report needs. No prompt text in any of them.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from measure import TEMPLATES

FOLDER = Path(__file__).parents[1] / "docs" / "measured" / "replay"
PROGRAM = Path(sys.executable).with_name("kvshare")
CONFIG: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
LOGS, WORKLOADS, VIEWS, KEPT = (CONFIG[key] for key in ("logs", "workloads", "views", "kept"))
Document = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*LOGS, *WORKLOADS]))
    parser.set_defaults(view="found")
    for name, help_text in (("gates", "what each gate costs"), ("stores", "what a finite store costs")):
        parser.add_argument(f"--{name}", dest="view", action="store_const", const=name, help=help_text)
    given = parser.parse_intermixed_args()
    if unknown := set(given.names) - {*LOGS, *WORKLOADS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    given.out.mkdir(parents=True, exist_ok=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    view, runs = VIEWS[given.view], []
    for name in given.names or (*LOGS, *WORKLOADS):
        log = LOGS.get(name) or _workload(name, given.data, given.out)
        log = {**log, "options": [*log.get("options", []), *view["options"]]}
        document = _replay(name + view["suffix"], log, view.get("arms", log["arms"]), given)
        runs.append((log["title"], document))
    tables = ("\n".join(table(columns, rows(runs, view["rows"]))) for columns in view["tables"])
    sys.stdout.write("\n\n".join(tables) + "\n")


def table(columns: dict[str, str], rows: Iterable[Document]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    cells = [TEMPLATES.from_string(cell) for cell in columns.values()]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.render(row) for cell in cells)} |"


def rows(runs: Iterable[tuple[str, Document]], kind: str) -> Iterator[Document]:
    """What the cells of each row may name: a row is a run, or an arm of one."""
    for title, document in runs:
        arms = document["arms"]
        arm = {each["arm"]: each for each in arms}
        ours = arm.get("kvshare") or arm.get("kvshare-fingerprints")
        stores = [list(group) for _, group in groupby(arms, lambda each: each["arm"])]
        for own in stores if kind == "arm" else [arms]:
            yield {"title": title, "data": document["data"], "arms": own, "arm": arm, "ours": ours}


def _workload(name: str, data: Path, out: Path) -> Document:
    """A log that is made."""
    path = (out / f"{name}.jsonl.gz").resolve()
    sources = [text for source in WORKLOADS[name] for text in ("--source", str(data / source))]
    subprocess.run([PROGRAM, "workload", name, "--out", path, *sources, "--requests", "1000"], check=True)
    return {"title": f"`{name}`", "files": [path], "arms": CONFIG["workload_arms"]}


def _tokenizer(out: Path) -> Path:
    folder = out / "tekken"
    if not folder.exists():
        script = Path(__file__).with_name("tekken_tokenizer.py")
        subprocess.run([sys.executable, script, folder], check=True, stdout=subprocess.DEVNULL)
    return folder


def _replay(name: str, log: Document, arms: list[str], given: argparse.Namespace) -> Document:
    """What is kept of a run's document; it is written, too."""
    files = [given.data / file for file in log["files"]]  # a workload's path is absolute
    command: list[str | Path] = [PROGRAM, "replay", *files, *log["options"], "--arms", ",".join(arms)]
    command += ["--tokenizer", _tokenizer(given.out), "--out", given.out / name, "--json"]
    run = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    document = kept(json.loads(run.stdout))
    (FOLDER / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def kept(whole: Document) -> Document:
    """Of a results.json."""
    arms = [{**_picked(arm, "arm"), "by": _groups(arm["by"])} for arm in whole["arms"]]
    return {**_picked(whole, "document"), "arms": arms, "times": _picked(whole["times"], "times")}


def _groups(by: Document) -> Document:
    return {
        kind: {key: _picked(figures, "group") for key, figures in by[kind].items()} for kind in KEPT["by"]
    }


def _picked(whole: Document, kind: str) -> Document:
    return {key: whole[key] for key in KEPT[kind]}


if __name__ == "__main__":
    main()
