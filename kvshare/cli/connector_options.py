"""Options of `kvshare vllm` as settings of the connector, in the form `vllm serve` takes. Imports no vLLM."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer

from kvshare.errors import ConfigError, MissingExtraError
from kvshare.sizes import parse_size


def parse_bytes(text: object) -> int:
    """Return a number of bytes, with a unit or none: 4GiB, 1.5 GB, 1073741824. Raises a usage error."""
    try:
        return parse_size(str(text))
    except ValueError as exc:
        raise typer.BadParameter(f"{exc}, got {str(text)!r}") from None


def parse_connector(text: object) -> dict[str, Any]:
    """Settings of another connector, as in vLLM's --kv-transfer-config. Raises a usage error."""
    connector: object = None
    with suppress(ValueError):
        connector = json.loads(str(text))
    if not isinstance(connector, dict) or not isinstance(connector.get("kv_connector"), str):
        raise typer.BadParameter(
            'expected one connector as in --kv-transfer-config, {"kv_connector": "OffloadingConnector", '
            f'"kv_connector_extra_config": {{"cpu_bytes_to_use": 8000000000}}}} say; got {str(text)!r}'
        )
    return {"kv_role": "kv_both", **connector}


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


def parse_shared_tier(text: object) -> dict[str, Any]:
    """
    Return the address of a store, or a JSON object with settings of the section `shared_tier`. Raises a usage
    error that quotes no address.
    """
    from kvshare.settings import load_settings

    tier: object = {"url": str(text)}
    if str(text).lstrip().startswith("{"):
        try:
            tier = json.loads(str(text))
        except ValueError:
            tier = None
    if not isinstance(tier, dict) or not isinstance(tier.get("url"), str):
        raise typer.BadParameter(
            "expected redis://HOST:PORT/NUMBER, rediss:// for TLS, or JSON with settings of shared_tier, as "
            '{"url": ..., "ca_file": ...}'
        )
    for name, value in tier.items():
        if name.endswith("_file") and isinstance(value, str):
            tier[name] = str(Path(value).absolute())
    overrides = {f"shared_tier.{name}": value for name, value in tier.items()}
    try:
        return load_settings(overrides=overrides).shared_tier.model_dump()
    except ConfigError as exc:
        raise typer.BadParameter(str(exc)) from None


def shared_settings(tier: Mapping[str, Any] | None, *, kv_bytes: int) -> Mapping[str, object]:
    """Make the connector's settings. Raises a usage error, before vLLM loads the model."""
    if tier is None:
        return {}
    from kvshare.settings import SharedTierSettings
    from kvshare.tiers.shared_start import checked_seal

    chosen = SharedTierSettings.model_validate(tier)
    try:
        checked_seal(chosen)
    except (ConfigError, MissingExtraError) as exc:
        raise typer.BadParameter(str(exc), param_hint="--shared-tier") from None
    if chosen.max_bytes < kv_bytes:
        raise typer.BadParameter(
            f"max_bytes is {chosen.max_bytes}; expected at least --kv-bytes, {kv_bytes}",
            param_hint="--shared-tier",
        )
    return {"shared_tier": tier}


def connector_options(
    *,
    host: str,
    port: int,
    max_bytes: int,
    ranks: int = 1,
    below: Mapping[str, object] = MappingProxyType({}),
    beside: Mapping[str, Any] | None = None,
) -> list[str]:
    """
    Return the options of `vllm serve` that put KVShare's connector to work.

    `ranks`: data-parallel ones. Each has `max_bytes`, and rank r has the control port `port + r`. `below`:
    the connector's settings of a disk for each, and of a store that they share.
    `beside`: another connector, which loads what KVShare has not.
    """
    from kvshare.vllm_protocol.messages import WORKER_CLASS

    settings: dict[str, Any] = {"control_host": host, "control_port": port, "max_bytes": max_bytes, **below}
    if ranks > 1:
        settings["data_parallel_size"] = ranks
    transfer = {
        "kv_connector": "KVShareConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # if KV is gone by then, the request does not fail
        "kv_connector_extra_config": {"kvshare": settings},
    }
    if beside is not None:
        transfer = {
            **transfer,
            "kv_connector": "KVShareMultiConnector",
            "kv_connector_extra_config": {"connectors": [transfer, beside]},
        }
    text = json.dumps(transfer, separators=(",", ":"))
    return ["--kv-transfer-config", text, "--worker-cls", WORKER_CLASS, "--enable-prompt-tokens-details"]
