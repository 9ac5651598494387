"""`code`: a file of Python's standard library whose functions were edited, moved or joined by another."""

import ast
import importlib.util
import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kvshare_lab.fidelity.scenario import Draft, Messages
from kvshare_lab.fidelity.suites.library import TEXTS, Library, Source, in_turn, name_of, shuffled

# Their texts differ between versions of Python, as the drafts then do.
_MODULES = (
    "bisect", "calendar", "colorsys", "configparser", "copy", "csv", "difflib", "filecmp", "fnmatch",
    "fractions", "functools", "glob", "graphlib", "gzip", "heapq", "imaplib", "locale", "mailbox",
    "numbers", "optparse", "poplib", "pprint", "queue", "quopri", "random", "sched", "shelve", "shlex",
    "shutil", "smtplib", "statistics", "string", "tabnanny", "tarfile", "textwrap", "timeit", "zipfile",
)  # fmt: skip
_FUNCTION = 160, 1400  # characters
_SHOWN = 3, 7  # functions
_WORD = re.compile(r"\b[a-z_]{4,}\b")


def code(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    Functions of one file with a question about one of them. Label `change`: a name in one was replaced
    (`edit`), they come in another order (`order`), or one more came in front (`added`).
    """
    files = library.own(
        [Source(name_of("code", name), name) for name in _MODULES if len(_functions(name)) >= 5]
    )
    chosen = in_turn(files, number)
    functions = list(_functions(chosen.item))
    shown = draw.sample(functions, min(len(functions) - 1, draw.randint(*_SHOWN)))
    change = in_turn(("edit", "order", "added"), number)
    now = {
        "edit": lambda: [_renamed(shown[0], draw), *shown[1:]],
        "order": lambda: shuffled(shown, draw),
        "added": lambda: [next(each for each in functions if each not in shown), *shown],
    }[change]()
    ask = draw.choice(TEXTS["code"]["asks"])
    return Draft(
        source=chosen.name,
        stored=(_prompt(chosen.item, shown, draw.choice(TEXTS["code"]["asks"])),),
        prompt=_prompt(chosen.item, now, ask),
        labels={"change": change},
    )


@cache
def _functions(module: str) -> Sequence[str]:
    """The functions and methods of a module that are neither short nor long, without their docstrings."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ()
    text = Path(spec.origin).read_text(encoding="utf-8")
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    found = (ast.unparse(node) for node in nodes)
    return tuple(dict.fromkeys(each for each in found if _FUNCTION[0] <= len(each) <= _FUNCTION[1]))


def _renamed(function: str, draw: random.Random) -> str:
    """The function with one of its names replaced everywhere."""
    names = sorted({*_WORD.findall(function)} - {"return", "else", "elif", "while", "break", "self", "from"})
    old = draw.choice(names) if names else "self"
    return re.sub(rf"\b{old}\b", f"{old}_{draw.choice(('new', 'now', 'raw'))}", function)


def _prompt(module: str, functions: Sequence[str], ask: str) -> Messages:
    text = TEXTS["code"]["user"].format(module=module, code="\n\n".join(functions), ask=ask)
    return ({"role": "system", "content": TEXTS["code"]["system"]}, {"role": "user", "content": text})
