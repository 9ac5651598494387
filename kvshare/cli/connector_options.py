"""What `kvshare vllm` tells KVShare's connector, in the words of `vllm serve`. Imports no vLLM."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer


def parse_bytes(text: object) -> int:
    """A number of bytes with or without a unit: 4GiB, 1.5 GB, 500MB, 1073741824. Raises a usage error."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b|b?)", str(text).strip().lower())
    if match is None or ("." in match[1] and match[2] is None):
        raise typer.BadParameter(f"expected a size such as 4GiB, 500MB or 1073741824, got {str(text)!r}")
    power = " kmgt".index(match[2] or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def parse_connector(text: object) -> dict[str, Any]:
    """Settings of another connector, as in vLLM's --kv-transfer-config. Raises a usage error."""
    found: object = None
    with suppress(ValueError):
        found = json.loads(str(text))
    if not isinstance(found, dict) or not isinstance(found.get("kv_connector"), str):
        raise typer.BadParameter(
            'expected one connector as in --kv-transfer-config, {"kv_connector": "OffloadingConnector", '
            f'"kv_connector_extra_config": {{"cpu_bytes_to_use": 8000000000}}}} say; got {str(text)!r}'
        )
    return {"kv_role": "kv_both", **found}


def disk_settings(
    folder: Path | None, disk_bytes: int | None, *, kv_bytes: int, ranks: int
) -> Mapping[str, object]:
    """Return the connector's settings of a disk. Raises a usage error."""
    if folder is None:
        if disk_bytes is not None:
            raise typer.BadParameter("there is no --disk", param_hint="--disk-bytes")
        return {}
    disk_bytes = 2 * kv_bytes if disk_bytes is None else disk_bytes
    if disk_bytes < kv_bytes:
        raise typer.BadParameter(
            f"{disk_bytes} bytes; expected at least --kv-bytes, {kv_bytes}: what is in memory is on disk, "
            "too",
            param_hint="--disk-bytes",
        )
    return {"disk_path": str(folder.absolute()), "disk_bytes": disk_bytes // ranks}


def connector_options(
    *,
    host: str,
    port: int,
    max_bytes: int,
    ranks: int = 1,
    disk: Mapping[str, object] = MappingProxyType({}),
    beside: Mapping[str, Any] | None = None,
) -> list[str]:
    """
    The options of `vllm serve` that put KVShare's connector to work.

    `ranks`: data-parallel ones. Each has `max_bytes`, and rank r has the control port `port + r`. `disk`: the
    connector's settings of a disk for each.
    `beside`: another connector, which loads what KVShare has not.
    """
    from kvshare.vllm_protocol.messages import WORKER_CLASS

    own: dict[str, Any] = {"control_host": host, "control_port": port, "max_bytes": max_bytes, **disk}
    if ranks > 1:
        own["data_parallel_size"] = ranks
    transfer = {
        "kv_connector": "KVShareConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # if KV is gone by then, the request does not fail
        "kv_connector_extra_config": {"kvshare": own},
    }
    if beside is not None:
        transfer = {
            **transfer,
            "kv_connector": "KVShareMultiConnector",
            "kv_connector_extra_config": {"connectors": [transfer, beside]},
        }
    text = json.dumps(transfer, separators=(",", ":"))
    return ["--kv-transfer-config", text, "--worker-cls", WORKER_CLASS, "--enable-prompt-tokens-details"]
