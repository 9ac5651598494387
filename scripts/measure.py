"""
Runs every benchmark that the README quotes, one after the other, and prints its table.

    .venv/bin/python scripts/measure.py [NAME ...] > table.md      # documents: docs/measured/NAME.json

measure.yaml says which, and how a document is said in words.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import yaml

FOLDER = Path(__file__).parents[1] / "docs" / "measured"
ROWS: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)


TEMPLATES = jinja2.Environment(undefined=jinja2.StrictUndefined)
TEMPLATES.filters |= {
    "fixed": lambda value, digits: f"{value:.{digits}f}",
    "percent": lambda value, digits=0: f"{100 * value:.{digits}f} %",
    "scientific": lambda value: f"{value:.1e}",
}


def in_words(name: str, document: dict[str, Any]) -> str:
    """What the document of that row says. Raises jinja2.UndefinedError if it lacks a figure."""
    return TEMPLATES.from_string(ROWS[name]["words"]).render(document)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    kvshare = Path(sys.executable).with_name("kvshare")
    lines = ["| what | measured | command |", "|---|---|---|"]
    for name in sys.argv[1:] or ROWS:
        command = ROWS[name]["command"]
        run = subprocess.run(
            [kvshare, "bench", *command.split(), "--json"], stdout=subprocess.PIPE, check=True, text=True
        )
        (FOLDER / f"{name}.json").write_text(run.stdout, encoding="utf-8")
        words = in_words(name, json.loads(run.stdout))
        lines.append(f"| {ROWS[name]['title']} | {words} | `kvshare bench {command} --json` |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
