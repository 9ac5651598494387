"""
Repair rules by name: which of the copied tokens are computed again.

    rules.yaml      the name, title and source of each rule
    structural.py   by place alone: the server's default, chunk heads, edit windows, block ends ...
    deviation.py    by how far the first layers' fresh K and V are from the copied ones
    attention.py    by the attention that they receive
    cachecraft.py   by the attention of the stored prompts' prefill
    kvshare.py      our own
"""

from collections.abc import Mapping

from kvshare.bench.fidelity.rules import attention, cachecraft, deviation, kvshare, structural
from kvshare.bench.fidelity.rules.base import Rule
from kvshare.bench.fidelity.texts import texts_beside

_CHOICES = {
    **structural.CHOICES,
    **deviation.CHOICES,
    **attention.CHOICES,
    **cachecraft.CHOICES,
    **kvshare.CHOICES,
}

RULES: Mapping[str, Rule] = {
    name: Rule(name, *_CHOICES[name], **row) for name, row in texts_beside(__file__, "rules.yaml").items()
}
