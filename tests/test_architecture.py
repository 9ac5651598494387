"""docs/architecture.md names files, functions and threads that exist; docs/map.md names every package."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TRACES = TEXT.split("## Trace: embedded engine\n")[1].split("## Threads and locks\n")[0]
MAP = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
ROOMS = ("delta_tree", "kvshare", "lab/src/kvshare_lab", "proxy", "vector_index")
MODULES = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")]
CALL = re.compile(r"^ *([\w/]+\.py) +([A-Za-z_][\w.]*)(?:, ([a-z_]\w*))? {2,}", re.MULTILINE)


def modules(name: str) -> list[Path]:
    """The modules that a path, of which the document may give the end only, can mean."""
    return [path for path in MODULES if f"/{path.as_posix()}".endswith(f"/{name}")]


def test_every_module_exists() -> None:
    """Each name that ends in .py is a module of a package, or a test."""
    names = {name for name in re.findall(r"[\w/]+\.py\b", TEXT) if not name.startswith("tests/")}
    assert [name for name in sorted(names) if not modules(name)] == []
    assert all((ROOT / name).exists() for name in re.findall(r"\btests/[\w/]+\.py\b", TEXT))


def test_every_call_of_the_traces_is_defined_where_it_stands() -> None:
    """A module of a trace defines the functions and classes beside it, or has them from a base class."""
    calls = [(match[1], name) for match in CALL.finditer(TRACES) for name in (match[2], match[3]) if name]
    assert len(calls) > 30
    for module, name in calls:
        for part in name.split("."):
            sources = [(ROOT / path).read_text(encoding="utf-8") for path in modules(module)]
            assert any(re.search(rf"(?:def|class) {part}\b", source) for source in sources), (
                f"{module}: {name}"
            )


def test_every_thread_is_started() -> None:
    """Each thread name is in the code, whole or without its prefix."""
    code = "".join((ROOT / path).read_text(encoding="utf-8") for path in MODULES)
    names = set(re.findall(r"`kvshare-([a-z-]+)`", TEXT))
    assert len(names) > 8
    assert [name for name in names if f'"kvshare-{name}"' not in code and f'"{name}"' not in code] == []


def test_every_package_has_its_line_on_the_map() -> None:
    """One line a package, of the product and of the lab, and no line of another folder."""
    packages = {path.parent.as_posix() for path in MODULES}
    lines = re.findall(r"^\| `([\w/]+)` \| \S", MAP, re.MULTILINE)
    assert sorted(lines) == sorted(packages)


def test_what_is_to_be_changed_is_where_the_map_says() -> None:
    """Paths from the root, of files that exist, and names that stand in the file before them."""
    rows = MAP.split("## Where to change what\n")[1].split("\n## ")[0]
    paths = re.findall(r"`([\w./-]+/[\w./-]+|[\w-]+\.yaml)`", rows)
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []
    named = re.findall(r"`([\w/]+\.py)`, `(\w+)`|`(_\w+)` of `([\w/]+\.py)`", rows)
    for path, name in ((before or after, name or other) for before, name, other, after in named):
        assert name in (ROOT / path).read_text(encoding="utf-8"), (path, name)


def test_a_package_that_lists_its_files_lists_all_of_them() -> None:
    """A file that a list leaves out is not looked for. A docstring with three of them is a list."""
    missing = {}
    for path in (path for path in MODULES if path.name == "__init__.py"):
        docstring = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or ""
        listed = re.findall(r"(?<![\w/])\w+\.py\b", docstring)
        files = {file.name for file in (ROOT / path.parent).glob("*.py")} - {"__init__.py"}
        if len(files.intersection(listed)) >= 3 and (unlisted := files.difference(listed)):
            missing[path.parent.as_posix()] = sorted(unlisted)
    assert missing == {}


def test_every_path_of_the_way_on_the_map_is_a_package() -> None:
    """A newcomer opens the folders that the steps name."""
    steps = MAP.split("\n## The way of a request in front of vLLM\n")[1]
    names = {
        name
        for name in re.findall(r"`([\w/]+)`", steps)
        if "/" in name.strip("/") and not name.startswith("/")
    }
    packages = {path.parent.as_posix() for path in MODULES}
    assert len(names) > 6
    assert [name for name in sorted(names) if not {name, f"kvshare/{name}"} & packages] == []
