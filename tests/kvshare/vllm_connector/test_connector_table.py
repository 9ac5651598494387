"""The table of vLLM's calls at the top of connector.py. Nothing is imported: the file is read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

CONNECTOR = Path(__file__).parents[3] / "kvshare" / "vllm_connector" / "connector.py"


def test_every_method_is_in_the_table_in_its_order() -> None:
    """Who calls a method, and how often, is the first thing that a reader sees."""
    tree = ast.parse(CONNECTOR.read_text())
    (connector,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    methods = [node.name for node in connector.body if isinstance(node, ast.FunctionDef)]
    rows = re.findall(r"^      (\w+(?:, \w+)*)", ast.get_docstring(tree, clean=False) or "", re.MULTILINE)
    listed = [name for row in rows for name in row.split(", ")]
    assert len(listed) > 20
    assert listed == [name for name in methods if not name.startswith("_")]
