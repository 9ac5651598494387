"""The connector's settings: `kv_connector_extra_config["kvshare"]` of `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Defaults are those of `kvshare vllm`."""

    control_host: str = "127.0.0.1"
    control_port: int = 8001  # 0: any free one
    max_bytes: int = 4 * 1024**3  # host memory for kept KV, over all ranks

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> Self:
        """Raises ValueError, naming the key and what was expected."""
        given = extra.get("kvshare", {})
        if not isinstance(given, Mapping):
            raise ValueError(
                f"kv_connector_extra_config.kvshare: expected an object, got {type(given).__name__}"
            )
        types = {field.name: str if field.name == "control_host" else int for field in fields(cls)}
        for name, value in given.items():
            if name not in types:
                raise ValueError(
                    f"kv_connector_extra_config.kvshare.{name}: unknown; expected one of {', '.join(types)}"
                )
            if type(value) is not types[name] or (isinstance(value, int) and value < 0):
                raise ValueError(
                    f"kv_connector_extra_config.kvshare.{name}: expected "
                    f"{'text' if types[name] is str else 'a whole number of at least 0'}, got {value!r}"
                )
        return cls(**given)
