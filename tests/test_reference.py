"""docs/reference.md has every setting, environment variable and command, and no other."""

import re
from pathlib import Path
from typing import Any

import typer
import yaml

from kvshare.cli.main import app
from kvshare.settings import (
    KeySettings,
    ReplicaSettings,
    RuleSettings,
    TenantSettings,
    default_config_path,
)

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    """The text below a heading, up to the next one."""
    return TEXT.split(f"# {heading}\n")[1].split("\n#")[0]


def first_cells(heading: str) -> list[str]:
    """What stands in backticks in the first column of a section's tables."""
    rows = [line for line in section(heading).splitlines() if line.startswith(("| `", "| [`"))]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def test_every_setting_with_its_default() -> None:
    """Each key of config.yaml has a row with its default, in the file's order."""
    tree = yaml.safe_load(default_config_path().read_text(encoding="utf-8"))
    expected: dict[str, Any] = {"rules": tree.pop("rules")}
    expected |= {f"{name}.{key}": value for name, part in tree.items() for key, value in part.items()}
    rows = re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \|", section("Settings"), re.MULTILINE)
    assert {name: yaml.safe_load(default) for name, default in rows} == expected
    assert len(rows) == len(expected)


def test_every_field_of_the_lists_among_the_settings() -> None:
    """Keys, replicas and rules have the fields that their tables name."""
    for heading, model in (
        ("Fields of an API key", KeySettings),
        ("Fields of a tenant", TenantSettings),
        ("Fields of a replica", ReplicaSettings),
        ("Fields of a rule", RuleSettings),
    ):
        fields = model.model_fields.items()
        assert first_cells(heading) == [field.alias or name for name, field in fields], heading


def test_every_environment_variable() -> None:
    """The variables that begin with KVSHARE_ are those that the packages name."""
    code = "".join(
        path.read_text(encoding="utf-8")
        for room in ("kvshare", "proxy", "vector_index")
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".toml")
    )
    named = set(re.findall(r"\"(KVSHARE_[A-Z_]+)\"", code))
    assert {name for name in first_cells("Environment variables") if name.startswith("KVSHARE_")} == named


def test_every_command() -> None:
    """Each command has a row here and a heading in docs/cli.md."""
    commands = {f"kvshare {name}" for name in typer.main.get_command(app).commands}  # type: ignore[attr-defined]
    assert {name for name in first_cells("Command line") if name.startswith("kvshare")} == commands
    assert set(re.findall(r"^## (kvshare [\w-]+)$", COMMANDS, re.MULTILINE)) == commands


def test_every_header_of_ours() -> None:
    """The headers that begin with X-KVShare- are those that the proxy writes."""
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "proxy").rglob("*.py"))
    written = set(re.findall(r"X-KVShare-[A-Za-z]+", code))
    assert set(re.findall(r"`(X-KVShare-[A-Za-z]+)`", section("Headers"))) == written
