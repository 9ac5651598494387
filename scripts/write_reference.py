"""
Writes the tables of docs/reference.md again, and the lines of docs/cli.md that list a command's options. The
code decides which rows a table has, and their names, defaults, labels and reasons. All other cells stay as
they are on the page. A new row gets the words that the code has for it: complete them by hand.

    .venv/bin/python scripts/write_reference.py
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml

from exposed_metrics import FIXED, Exposed, exposed_metrics
from kvshare.cli.main import app
from kvshare.cli.plugins import LAB
from kvshare.errors import ErrorCode
from kvshare.reasons import explanations
from kvshare.settings import KeySettings, ReplicaSettings, RuleSettings, TenantSettings, default_config_path
from kvshare.telemetry import Component

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
COMMANDS = ROOT / "docs" / "cli.md"
_CODE = re.compile(r"`([^`]+)`")
_TAKES = "*Takes:*"
_FIELDS = {
    "Fields of an API key": KeySettings,
    "Fields of a tenant": TenantSettings,
    "Fields of a replica": ReplicaSettings,
    "Fields of a rule": RuleSettings,
}


@dataclass(frozen=True, slots=True)
class Row:
    """
    A row of a table. `name`: in backticks in its first cell; `cells`: of a new row; `fixed`: those of them
    that the code decides, by column.
    """

    name: str
    cells: tuple[str, ...]
    fixed: Mapping[int, str]

    @classmethod
    def of(cls, name: str, *cells: str, fixed: Mapping[int, str] | None = None) -> "Row":
        return cls(name, (f"`{name}`", *cells), fixed or {})


@dataclass(frozen=True, slots=True)
class Table:
    """A table's place in the lines of the page, without its head. `written`: cells by name."""

    start: int
    end: int
    written: Mapping[str, tuple[str, ...]]

    @classmethod
    def below(cls, heading: str, lines: Sequence[str]) -> "Table":
        at = next(place for place, line in enumerate(lines) if re.fullmatch(rf"#+ {heading}", line))
        start = next(place for place in range(at, len(lines)) if lines[place].startswith("|---")) + 1
        end = next(
            (place for place in range(start, len(lines)) if not lines[place].startswith("|")), len(lines)
        )
        cells = [_cells(line) for line in lines[start:end]]
        return cls(start, end, {name: row for row in cells for name in _CODE.findall(row[0])})


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("|").split("|"))


def _line(cells: Iterable[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def settings() -> Iterator[Row]:
    """Each key of config.yaml; a new one is explained by the comment there."""
    text = default_config_path().read_text(encoding="utf-8")
    tree = yaml.safe_load(text)
    sections = {name: part for name, part in tree.items() if isinstance(part, dict)}
    for section, part in sections.items():
        for key, default in part.items():
            comment = re.search(rf"^  {key}: .*?# (.*)$", text, re.MULTILINE)
            shown = f"`{_as_yaml(default)}`"
            yield Row.of(f"{section}.{key}", shown, "", comment[1] if comment else "", fixed={1: shown})
    for name in tree.keys() - sections.keys():
        yield Row.of(name, f"`{_as_yaml(tree[name])}`", "", "", fixed={1: f"`{_as_yaml(tree[name])}`"})


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def fields_of(model: Any) -> Iterator[Row]:
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{field.default}`"
        yield Row.of(field.alias or name, default, field.description or "")


def commands() -> Iterator[Row]:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        link = f"[`kvshare {name}`](cli.md#kvshare-{name})"
        yield Row(f"kvshare {name}", (link, command.get_short_help_str(100)), {})


def variables() -> Iterator[Row]:
    """Those that begin with KVSHARE_, as the packages name them."""
    files = (file for room in ("kvshare", "proxy", "vector_index") for file in (ROOT / room).rglob("*.py"))
    for name in sorted(
        {name for file in files for name in re.findall(r'"(KVSHARE_[A-Z_]+)"', file.read_text())}
    ):
        yield Row.of(name, "", "")


def reasons() -> Iterator[Row]:
    for name, sentences in explanations().items():
        yield Row.of(name, sentences, fixed={1: sentences})


def metrics(exposed: Exposed, written: Mapping[str, tuple[str, ...]]) -> Iterator[Row]:
    """
    Each metric of a server's registry. Values of a label are on the page if there are few: those of an enum
    are all there, others at least as far as the registry shows them.
    """
    for name, metric in exposed.items():
        known = dict(_labels(written[name][1])) if name in written else {}
        labels = {
            label: _values(FIXED.get((name, label)), known.get(label, []), metric.labels[label])
            for label in (*(old for old in known if old in metric.labels), *(metric.labels.keys() - known))
        }
        shown = "; ".join(f"`{label}`" + _listed(values) for label, values in labels.items())
        yield Row.of(name, shown, metric.text, "", fixed={1: shown})


def _labels(cell: str) -> Iterator[tuple[str, list[str]]]:
    """Read a cell like "`source`: `compute`, `kvshare_exact`; `rule`"."""
    for part in filter(None, cell.split("; ")):
        label, *values = _CODE.findall(part)
        yield label, values


def _values(every: Sequence[str] | None, known: list[str], seen: set[str]) -> list[str]:
    if every is None:
        return [*known, *sorted(seen.difference(known))] if known else []
    return known if set(known) == set(every) else list(every)


def _listed(values: Sequence[str]) -> str:
    return ": " + ", ".join(f"`{value}`" for value in values) if values else ""


def written_again(page: str) -> str:
    """The page with the rows that the code has, in the order of the page; new ones come last."""
    lines = page.splitlines()
    tables: dict[str, list[Row]] = {heading: [*fields_of(model)] for heading, model in _FIELDS.items()}
    tables |= {"Settings": [*settings()], "Command line": [*commands()], "Reasons": [*reasons()]}
    tables["Environment variables"] = [*variables()]
    tables["Components"] = [Row.of(name, "", "", "") for name in (*Component, "replica")]
    tables["Error codes"] = [Row.of(code, "", "", "") for code in ErrorCode]
    tables["Metrics"] = [*metrics(exposed_metrics(), Table.below("Metrics", lines).written)]
    for heading, rows in tables.items():
        table = Table.below(heading, lines)
        lines[table.start : table.end] = _rows(table, rows, lines[table.start : table.end])
    return "\n".join(lines) + "\n"


def _rows(table: Table, rows: Sequence[Row], old: Sequence[str]) -> list[str]:
    by_name = {row.name: row for row in rows}
    lines = []
    for line in old:
        cells = _cells(line)
        names = [name for name in _CODE.findall(cells[0]) if name in by_name]
        if names:
            fixed = by_name[names[0]].fixed
            if len(names) < len(_CODE.findall(cells[0])):
                fixed = {**fixed, 0: ", ".join(f"`{name}`" for name in names)}
            now = tuple(fixed.get(column, cell) for column, cell in enumerate(cells))
            lines.append(line if now == cells else _line(now))
    return lines + [_line(row.cells) for row in rows if row.name not in table.written]


def options_again(page: str) -> str:
    """The page of the commands, with a line below each heading that lists what the command takes."""
    group: Any = typer.main.get_command(app)
    parts = re.split(r"^## (kvshare [\w-]+)\n\n", page, flags=re.MULTILINE)
    for at in range(1, len(parts), 2):
        command = group.commands[parts[at].removeprefix("kvshare ")]
        rest = parts[at + 1]
        if rest.startswith(_TAKES):
            rest = rest.split("\n\n", 1)[1]
        takes = "" if command.name in LAB else f"{_TAKES} {_taken(command)}\n\n"
        parts[at : at + 2] = f"## {parts[at]}\n\n", takes + rest
    return "".join(parts)


def _taken(command: Any) -> str:
    if not hasattr(command, "commands"):
        return _options(command)
    return "; ".join(f"`{name}` ({_options(each)})" for name, each in command.commands.items())


def _options(command: Any) -> str:
    names = [
        f"`{parameter.metavar or parameter.name.upper()}`"
        if parameter.param_type_name == "argument"
        else f"`{next((name for name in parameter.opts if name.startswith('--')), parameter.opts[0])}`"
        for parameter in command.params
        if not parameter.hidden
    ]
    return ", ".join(names) or "nothing"


if __name__ == "__main__":
    PAGE.write_text(written_again(PAGE.read_text("utf-8")), "utf-8")
    COMMANDS.write_text(options_again(COMMANDS.read_text("utf-8")), "utf-8")
