"""
Repair rules by name: which of the copied tokens are computed again.

    base.py         what a rule is
    rules.yaml      the name, title and source of each rule
    structural.py   by place alone: the server's default, chunk heads, edit windows, block ends ...
    deviation.py    by how far the first layers' fresh K and V are from the copied ones
    attention.py    by the attention that they receive; the server's rule
    cachecraft.py   by the attention of the stored prompts' prefill
"""

from collections.abc import Mapping
from pathlib import Path

import yaml

from kvshare_lab.fidelity.rules import attention, cachecraft, deviation, structural
from kvshare_lab.fidelity.rules.base import Rule

_CHOICES = structural.CHOICES | deviation.CHOICES | attention.CHOICES | cachecraft.CHOICES
_ROWS = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))

RULES: Mapping[str, Rule] = {name: Rule(name, *_CHOICES[name], **row) for name, row in _ROWS.items()}
