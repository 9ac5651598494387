"""
The scheduler side as one thing: tickets, ledger, journal and control server, from start to shutdown.

It opens its office only after every worker has proven that sharing works; until then, and where anything is
refused, requests pass by.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.config import VllmConfig

import kvshare
from delta_tree import SegmentId
from kvshare.engines.vllm.versions import installed_version, untested
from kvshare.engines.vllm.wire import TOKEN_VARIABLE, ReplicaInfo
from kvshare.vllm_connector.config import ConnectorSettings
from kvshare.vllm_connector.metadata import WorkerFacts
from kvshare.vllm_connector.scheduler.control_server import ControlServer, Desk
from kvshare.vllm_connector.scheduler.event_log import EventLog
from kvshare.vllm_connector.scheduler.scheduler import TicketOffice
from kvshare.vllm_connector.scheduler.segment_index import Ledger

log = logging.getLogger("vllm.kvshare")

_NO_MODEL = "the workers were not given the model: start with `kvshare vllm`, or add --worker-cls {}"
_NO_ADDRESS = "the control server cannot answer on {}:{} ({}): give another --control-port, or --control-host"
WORKER_CLS = "kvshare.vllm_connector.workers.KVShareWorker"


class SchedulerSide:
    """One per vLLM. `office` is None where nothing is shared."""

    def __init__(self, config: VllmConfig, settings: ConnectorSettings, refusals: Sequence[str]) -> None:
        """
        Where the control server's address cannot be had, nothing is shared: the proxy could not ask.

        Raises: ValueError if it is open to other machines and KVSHARE_VLLM_TOKEN is not set
        """
        token = os.environ.get(TOKEN_VARIABLE) or None
        if token is None and not _is_loopback(settings.control_host):
            raise ValueError(
                f"control_host: other machines can reach {settings.control_host}; set {TOKEN_VARIABLE}, too"
            )
        self._config = config
        self._refusals = list(refusals)
        self._warnings = [message for message in [untested(_vllm_version())] if message]
        self._facts: list[WorkerFacts] = []
        self.events = EventLog()
        self.ledger = Ledger(settings.max_bytes)
        self.office: TicketOffice | None = None
        self._control: ControlServer | None = None  # where it cannot listen, nothing is shared
        try:
            self._control = ControlServer(
                Desk(self.info, self.events, self.ledger, self.drop),
                host=settings.control_host,
                port=settings.control_port,
                token=token,
            )
        except OSError as exc:
            if not self._refusals:
                host, port = settings.control_host, settings.control_port
                self._refusals.append(_NO_ADDRESS.format(host, port, exc.strerror or exc))

    @property
    def control_port(self) -> int | None:
        """None where the address cannot be had."""
        return self._control.port if self._control is not None else None

    def open(self, facts: Iterable[WorkerFacts]) -> None:
        """
        Take what every worker found out at start, and begin to share if nothing speaks against it.

        A worker without a model has no facts.
        """
        known = list(facts)
        self._facts = known
        if not self._refusals:
            if len(known) < self._config.parallel_config.world_size:
                self._refusals.append(_NO_MODEL.format(WORKER_CLS))
            self._refusals += dict.fromkeys(message for fact in known for message in fact.refusals)
        self._warnings += dict.fromkeys(message for fact in known for message in fact.warnings)
        for message in self._warnings:
            log.warning("kvshare: %s", message)
        if self._refusals:
            log.error(
                "kvshare: nothing is shared, requests are served as ever: %s", "; ".join(self._refusals)
            )
            return
        self.office = TicketOffice(
            self.ledger,
            self.events,
            bytes_per_token=self._bytes_per_token,
            block_size=self._config.cache_config.block_size,
            may_move_keys=self._may_move_keys,
        )
        log.info(
            "kvshare: sharing KV with %s; control server on port %d",
            known[0].attention_backend,
            self.control_port,
        )

    def drop(self, segment_ids: list[SegmentId]) -> int:
        """Let go of segments; for the control server, from any thread."""
        return self.office.drop(segment_ids) if self.office is not None else 0

    def close(self) -> None:
        if self._control is not None:
            self._control.close()

    def info(self) -> ReplicaInfo:
        """What `GET /info` answers. From any thread."""
        config = self._config
        refusals = tuple(self._refusals)
        if self.office is None and not refusals:
            refusals = ("starting: the workers have not reported yet",)
        return ReplicaInfo(
            epoch=self.events.epoch,
            model=_served_name(config),
            versions={
                "vllm": _vllm_version(),
                "torch": importlib.metadata.version("torch"),
                "kvshare": kvshare.__version__,
            },
            refusals=refusals,
            warnings=tuple(self._warnings),
            can_move_keys=self._may_move_keys,
            namespace_fields=self._namespace_fields(),
            bytes_per_token=self._bytes_per_token,
            max_bytes=self.ledger.max_bytes,
            num_bytes=self.ledger.num_bytes,
            num_segments=len(self.ledger),
            max_model_len=config.model_config.max_model_len,
            settings=self._settings(),
        )

    @property
    def _bytes_per_token(self) -> int:
        """Over all ranks."""
        return sum(fact.bytes_per_token for fact in self._facts)

    @property
    def _may_move_keys(self) -> bool:
        return bool(self._facts) and all(fact.can_move_keys for fact in self._facts)

    def _namespace_fields(self) -> dict[str, str]:
        model = self._config.model_config
        fact = self._facts[0] if self._facts else None
        heads = sum(fact.num_kv_heads for fact in self._facts)
        return {
            "model": model.model,
            "revision": "+".join(fact.weights for fact in self._facts),
            "tokenizer": f"{model.tokenizer}@{model.tokenizer_revision or ''}",
            "dtype": fact.dtype if fact else "",
            "kv_layout": f"{fact.num_layers}x{heads}x{fact.head_dim}" if fact else "",
            "rope": fact.rope if fact else "",
        }

    def _settings(self) -> dict[str, Any]:
        config = self._config
        transfer = config.kv_transfer_config
        return {
            "kv_load_failure_policy": transfer.kv_load_failure_policy if transfer else "",
            "worker_cls": str(config.parallel_config.worker_cls),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "block_size": config.cache_config.block_size,
            "attention_backend": self._facts[0].attention_backend if self._facts else "",
        }


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _served_name(config: VllmConfig) -> str:
    name = config.model_config.served_model_name
    return str(name[0] if isinstance(name, list) else name)


def _vllm_version() -> str:
    return installed_version() or "unknown"
