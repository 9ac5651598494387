"""Documents, help texts, docstrings, comments and log lines use the words of docs/glossary.md."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
LIST: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "words.yaml").read_text())
ROOMS = (
    "delta_tree",
    "deploy",
    "docs",
    "examples",
    "kvshare",
    "lab/scripts",
    "lab/src",
    "proxy",
    "scripts",
    "vector_index",
)
KINDS = {".py", ".md", ".yaml", ".toml", ".jinja"}
CODE_SPAN = re.compile(r"`[^`\n]*`|\{[^{}\n]*\}")
BANNED = re.compile(
    r"\b(" + "|".join(re.escape(word) for word in sorted(LIST["words"], key=len, reverse=True)) + r")\b",
    re.IGNORECASE,
)


def files() -> list[Path]:
    """Every file whose prose is checked."""
    found = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in KINDS]
    return sorted([*ROOT.glob("*.md"), ROOT / "config.yaml", *found])


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """
    (line, text) of what people read in a file; code spans and the braces of f-strings are left out.

    Of Python: comments, and strings with a blank in them, as one without is a name or a key.
    """
    source = path.read_text()
    if path.suffix != ".py":
        texts = [(number, line) for number, line in enumerate(source.splitlines(), 1)]
    else:
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        texts = [
            (token.start[0] + extra, line)
            for token in tokens
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string)
            for extra, line in enumerate(token.string.splitlines())
        ]
    for number, line in texts:
        yield number, CODE_SPAN.sub(" ", line)


def findings(path: Path) -> list[str]:
    """One sentence for each banned word of a file."""
    return [
        f"{path.relative_to(ROOT)}:{number}: '{hit}': write {LIST['words'][hit.lower()]}"
        for number, line in prose(path)
        for hit in BANNED.findall(line)
    ]


def listed(path: Path, paths: list[str]) -> str | None:
    """Which of these files and folders a path is, or lies in."""
    name = path.relative_to(ROOT).as_posix()
    return next((entry for entry in paths if name == entry or name.startswith(f"{entry.rstrip('/')}/")), None)


def test_nobody_reads_a_banned_word() -> None:
    """Files that are not listed as data hold none of the words."""
    found = [line for path in files() if not listed(path, LIST["skip"]) for line in findings(path)]
    assert not found, "\n".join(found)


def test_the_check_sees_every_kind_of_text(tmp_path: Path) -> None:
    """Docstrings, comments and log lines are read; names, keys and code spans are not."""
    module = tmp_path / "module.py"
    module.write_text(
        '"""A stranger."""\nstranger = {"stranger": 1}  # told\nlog.info("%s strangers", told)\n'
    )
    assert [hit for _, line in prose(module) for hit in BANNED.findall(line)] == [
        "stranger",
        "told",
        "strangers",
    ]
    page = tmp_path / "page.md"
    page.write_text("`stranger`, and one that is Told.\n")
    assert [hit for _, line in prose(page) for hit in BANNED.findall(line)] == ["Told"]
