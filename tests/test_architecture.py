"""docs/architecture.md names files, functions and threads that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TRACES = TEXT.split("## Trace: embedded engine\n")[1].split("## Threads and locks\n")[0]
MODULES = [
    path.relative_to(ROOT)
    for room in ("delta_tree", "kvshare", "lab", "proxy", "vector_index")
    for path in (ROOT / room).rglob("*.py")
]
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
