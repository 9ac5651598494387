"""
Runs every replay that docs/replay.md quotes and prints its tables; stores documents in docs/measured/replay/.

    .venv/bin/python lab/scripts/replay_logs.py DATA OUT [--limits | --stores] [NAME ...] > tables.md

With --limits the policies differ in how far answers may deviate, with --stores in the size of their stores.
DATA has the logs, with the names in replay_logs.yaml, which also defines the tables. The workloads, a
tokenizer and each run's folder with its report are written to OUT. What is stored is the part
of a run's results.json that the tables need (quote.py); none has prompt text.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from measure import TEMPLATES, kvshare
from quote import store

CONFIG: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
LOGS, WORKLOADS, VIEWS = (CONFIG[key] for key in ("logs", "workloads", "views"))
Document = dict[str, Any]


def main(
    data: Path,
    out: Path,
    names: Annotated[list[str] | None, typer.Argument(help=", ".join([*LOGS, *WORKLOADS]))] = None,
    *,
    limits: Annotated[bool, typer.Option("--limits", help="What is reused under each limit.")] = False,
    stores: Annotated[bool, typer.Option("--stores", help="What a finite store costs.")] = False,
) -> None:
    """Run the replays that docs/replay.md quotes, all or those named, and print their tables."""
    if unknown := {*(names or ())} - {*LOGS, *WORKLOADS}:
        raise typer.BadParameter(f"unknown: {', '.join(sorted(unknown))}")
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "tekken").exists():
        script = Path(__file__).with_name("tekken_tokenizer.py")
        subprocess.run([sys.executable, script, out / "tekken"], check=True, stdout=subprocess.DEVNULL)
    view, runs = VIEWS["limits" if limits else "stores" if stores else "found"], []
    for name in names or (*LOGS, *WORKLOADS):
        log = LOGS.get(name) or _workload(name, data, out)
        log = {**log, "options": [*log.get("options", []), *view["options"]]}
        document = _replay(name + view["suffix"], log, view.get("arms", log["arms"]), data, out)
        runs.append((log["title"], document))
    tables = ("\n".join(table(columns, rows(runs, view["rows"]))) for columns in view["tables"])
    typer.echo("\n\n".join(tables))


def table(columns: dict[str, str], rows: Iterable[Document]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    cells = [TEMPLATES.from_string(cell) for cell in columns.values()]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.render(row) for cell in cells)} |"


def rows(runs: Iterable[tuple[str, Document]], kind: str) -> Iterator[Document]:
    """The values for the cells of each row; a row is a run, or a policy of one."""
    for title, document in runs:
        arm = {each["arm"]: each for each in document["arms"]}
        ours = arm.get("kvshare") or arm.get("kvshare-fingerprints")
        for _, own in groupby(document["arms"], lambda each: kind == "arm" and each["arm"]):
            yield {"title": title, "data": document["data"], "arms": list(own), "arm": arm, "ours": ours}


def _workload(name: str, data: Path, out: Path) -> Document:
    path = (out / f"{name}.jsonl.gz").resolve()
    sources = [text for source in WORKLOADS[name] for text in ("--source", str(data / source))]
    kvshare("workload", name, "--out", path, *sources, "--requests", "1000")
    return {"title": f"`{name}`", "files": [path], "arms": CONFIG["workload_arms"]}


def _replay(name: str, log: Document, arms: list[str], data: Path, out: Path) -> Document:
    """Runs a replay, and stores and returns what the tables need of its document."""
    files = [data / file for file in log["files"]]  # a workload's path is absolute
    folders: list[str | Path] = ["--tokenizer", out / "tekken", "--out", out / name]
    run = kvshare("replay", *files, *log["options"], "--arms", ",".join(arms), *folders, "--json")
    document: Document = store(f"replay/{name}", json.loads(run))
    return document


if __name__ == "__main__":
    typer.run(main)
