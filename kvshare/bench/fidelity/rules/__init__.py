"""
Repair rules by name: what is computed again of the copied tokens.

    structural.py   by place alone: the server's default, chunk heads, edit windows, block ends ...
    deviation.py    by how far the first layers' fresh K and V are from the copied ones
    attention.py    by who is attended to
    cachecraft.py   by what attention did when the stored prompts were computed; its records are in chunks.py
    kvshare.py      our own
"""

from collections.abc import Mapping

from kvshare.bench.fidelity.rules import attention, cachecraft, deviation, kvshare, structural
from kvshare.bench.fidelity.rules.base import Rule

_MODULES = (structural, deviation, attention, cachecraft, kvshare)

RULES: Mapping[str, Rule] = {rule.name: rule for module in _MODULES for rule in module.RULES}
