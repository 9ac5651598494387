"""
The command of a soak's vLLM: that which `kvshare vllm` prints, with what it has no option for. Its loads fail
on demand, and next to KVShare another connector may keep whole blocks (block_keeper.py).
"""

import json
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

from kvshare.vllm_protocol.messages import WORKER_CLASS

_FAILING_WORKER = "kvshare_lab.vllm.failing_worker.FailingWorker"
_KEEPER = {
    "kv_connector": "BlockKeeper",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kvshare_lab.vllm.block_keeper",
}


def soak_command(command: Sequence[str], *, keeps_blocks: bool) -> list[str]:
    """
    The command that is printed by `command`, of `kvshare vllm`, with the worker class whose loads fail.

    Raises:  CalledProcessError if it prints none
    """
    others = ["--beside", json.dumps(_KEEPER)] if keeps_blocks else []
    printed = subprocess.run(
        [*command, *others, "--print-command"], stdout=subprocess.PIPE, check=True, text=True
    )
    words = [_FAILING_WORKER if word == WORKER_CLASS else word for word in shlex.split(printed.stdout)]
    if keeps_blocks:
        place = words.index("--kv-transfer-config") + 1
        words[place] = _with_safe_keeper(json.loads(words[place]))
    return words


def _with_safe_keeper(transfer: dict[str, Any]) -> str:
    """KVShare shares next to it, as it finds KV by vLLM's hashes of blocks."""
    ours, _ = transfer["kv_connector_extra_config"]["connectors"]
    ours["kv_connector_extra_config"]["kvshare"]["by_block_hash"] = [_KEEPER["kv_connector"]]
    return json.dumps(transfer)
