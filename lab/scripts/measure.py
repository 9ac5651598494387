"""
Runs the benchmarks that the documents quote, and writes the tables that quote them.

    .venv/bin/python lab/scripts/measure.py NAME ...   # runs these, writes the tables
    .venv/bin/python lab/scripts/measure.py --write    # writes the tables, runs nothing

Without a name all are run that need nothing but a CPU (hours).
What pages quote of a document is stored in docs/measured/NAME.json (quote.py); the command prints all of it.
measure.yaml has the command of each, and the template that puts its figures into words. In README.md and
docs/benchmarks.md a table stands between the lines `<!-- measured:begin NAME NAME ... -->` and
`<!-- measured:end -->`. With `measured:brief` the rows have the short titles and words of measure.yaml.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import yaml

from quote import FOLDER, store

ROOT = Path(__file__).parents[2]
QUOTING = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
ROWS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
TABLE = re.compile(r"(<!-- measured:(begin|brief) ([\w -]+) -->\n).*?(<!-- measured:end -->)", re.DOTALL)

TEMPLATES = jinja2.Environment(undefined=jinja2.StrictUndefined)
TEMPLATES.filters |= {
    "fixed": lambda value, digits: f"{value:.{digits}f}",
    "percent": lambda value, digits=0: f"{100 * value:.{digits}f} %",
    "scientific": lambda value: f"{value:.1e}",
    "thousands": lambda value: f"{value:,}",
}


def in_words(template: str, document: dict[str, Any]) -> str:
    """The figures of a row's document in words. Raises jinja2.UndefinedError if the document lacks one."""
    return TEMPLATES.from_string(template).render(document)


def table(names: list[str], *, is_brief: bool = False) -> str:
    """The rows as a Markdown table. Raises KeyError for a name that measure.yaml lacks, or lacks in brief."""
    lines = ["| what | measured | command |", "|---|---|---|"]
    for name in names:
        row = ROWS[name]["brief"] if is_brief else ROWS[name]
        document = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        command = f"`kvshare bench {ROWS[name]['command']} --json`"
        lines.append(f"| {row['title']} | {in_words(row['words'], document)} | {command} |")
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """The text with each of its tables as the documents in docs/measured have it."""

    def written(match: re.Match[str]) -> str:
        return match[1] + table(match[3].split(), is_brief=match[2] == "brief") + match[4]

    return TABLE.sub(written, text)


def kvshare(*arguments: str | Path) -> str:
    """What this command of `kvshare` prints. Raises CalledProcessError if it fails."""
    command: list[str | Path] = [Path(sys.executable).with_name("kvshare"), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


def main() -> None:
    arguments = sys.argv[1:]
    if arguments != ["--write"]:
        for name in arguments or [name for name, row in ROWS.items() if "needs" not in row]:
            if needs := ROWS[name].get("needs"):
                sys.exit(
                    f"{name} needs {needs}: run its command yourself and store what it prints (quote.py)"
                )
            store(name, json.loads(kvshare("bench", *ROWS[name]["command"].split(), "--json")))
    for path in QUOTING:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
