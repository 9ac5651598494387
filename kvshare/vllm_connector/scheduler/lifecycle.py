"""
Start and shutdown of the scheduler side: segment index, event log, control server and `ConnectorScheduler`.

Sharing starts when every worker has reported a passed self-test. Until then, or if something is not
supported, vLLM serves requests unshared.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.config import VllmConfig

import kvshare
from kvshare.loopback import is_loopback
from kvshare.namespace import joined
from kvshare.tiers.shared_start import open_shared_store, place_name
from kvshare.vllm_connector.config import ConnectorSettings, data_parallel_rank
from kvshare.vllm_connector.metadata import WorkerHandshake
from kvshare.vllm_connector.scheduler.control_server import ControlServer
from kvshare.vllm_connector.scheduler.event_log import EventLog
from kvshare.vllm_connector.scheduler.models_with_media import media_rules, media_settings
from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler
from kvshare.vllm_connector.scheduler.segment_index import SegmentIndex
from kvshare.vllm_connector.scheduler.shared_news import SharedNews
from kvshare.vllm_connector.speculation import method_of, passing_unverified, why_unshared
from kvshare.vllm_protocol.messages import TOKEN_VARIABLE, WORKER_CLASS
from kvshare.vllm_protocol.replica_info import ReplicaInfo
from kvshare.vllm_protocol.versions import installed_version, only_read, untested

log = logging.getLogger("vllm.kvshare")

_NO_MODEL = "the workers did not get the model: start with `kvshare vllm`, or add --worker-cls {}"
_NO_ADDRESS = "the control server cannot listen on {}:{} ({}): set another --control-port or --control-host"


class SchedulerSide:
    """
    One per engine (a vLLM with data parallelism has several). `scheduler` takes tickets once sharing starts.
    """

    def __init__(self, config: VllmConfig, settings: ConnectorSettings, unsupported: Sequence[str]) -> None:
        """
        If the control server cannot listen, nothing is shared, because the proxy could not read events.

        Raises: ValueError if other machines can reach the control server and KVSHARE_VLLM_TOKEN is not set
        """
        token = os.environ.get(TOKEN_VARIABLE) or None
        if token is None and not is_loopback(settings.control_host):
            raise ValueError(
                f"control_host: other machines can reach {settings.control_host}; set {TOKEN_VARIABLE}, too"
            )
        self._config = config
        self._connector = settings
        self._rank = data_parallel_rank(config)
        # 0 means any free port, on every rank.
        port = settings.control_port and settings.control_port + (self._rank or 0)
        self._unsupported = list(unsupported)
        self._passing = why_unshared(config)
        self._vllm_version = installed_version() or "unknown"
        about_version = untested(self._vllm_version) or only_read(self._vllm_version)
        self._warnings = [about_version] if about_version is not None else []
        self._has_started = False
        self._handshakes: list[WorkerHandshake] = []
        self.events = EventLog()
        self.segments = SegmentIndex(settings.max_bytes, max_disk_bytes=settings.disk_bytes)
        self.scheduler = ConnectorScheduler(
            segments=self.segments, events=self.events, media_rules=media_rules(config.model_config)
        )
        self._control: ControlServer | None = None
        try:
            self._control = ControlServer(
                self.info, self.scheduler, host=settings.control_host, port=port, token=token
            )
        except OSError as exc:
            if not self._unsupported:
                host, problem = settings.control_host, exc.strerror or exc
                self._unsupported.append(_NO_ADDRESS.format(host, port, problem))

    def start_sharing(self, handshakes: Iterable[WorkerHandshake]) -> None:
        """
        Share if every worker can. A worker that did not get the model sends no handshake.

        Later calls change nothing: workers send the same handshake again when they wake up.
        """
        if self._has_started:
            return
        self._has_started = True
        workers = list(handshakes)
        self._handshakes = workers
        self.scheduler.use(workers, step_tokens=self._step_tokens())
        if not self._unsupported:
            if len(workers) < self._config.parallel_config.world_size and self._passing is None:
                self._unsupported.append(_NO_MODEL.format(WORKER_CLASS))
            self._unsupported += dict.fromkeys(
                message for worker in workers for message in worker.unsupported
            )
        self._warnings += dict.fromkeys(message for worker in workers for message in worker.warnings)
        for message in self._warnings:
            log.warning("kvshare: %s", message)
        if self._unsupported:
            problems = "; ".join(self._unsupported)
            log.error("kvshare: nothing is shared, requests are served without it: %s", problems)
            return
        if unverified := dict.fromkeys(worker.unverified for worker in workers if worker.unverified):
            self._passing = passing_unverified(self._config, "; ".join(unverified))
        if self._passing is not None:
            log.warning("kvshare: requests pass unshared: %s", self._passing)
            return
        if any(worker.has_disk for worker in workers):
            self.scheduler.disk.has_files = any(worker.has_files for worker in workers)
            self.scheduler.disk.begin(workers[0].on_disk)
            self._share_store(workers[0].shared_form)
        self.scheduler.times.steps.is_on = bool(method_of(self._config))
        assert self._control is not None  # otherwise its address would be among `_unsupported`
        self.scheduler.shares = True
        backend, port = workers[0].attention_backend, self._control.port
        log.info("kvshare: sharing KV with %s; control server on port %d", backend, port)

    def _share_store(self, form: str) -> None:
        """Follow a shared store. `form`: fingerprint of what workers write there; empty: they use none."""
        settings = self._connector.shared_tier
        if settings is None or not form:
            return
        store = open_shared_store(settings, form)
        self.segments.disk.max_bytes = max(settings.max_bytes, self.segments.disk.max_bytes)
        news = SharedNews(store, self.scheduler.disk, place=place_name(settings, store))
        self.scheduler.news = news
        news.begin()

    def close(self) -> None:
        if self.scheduler.news is not None:
            self.scheduler.news.close()
        if self._control is not None:
            self._control.close()

    def info(self) -> ReplicaInfo:
        """Return the answer to `GET /info`. Thread-safe."""
        config, names = self._config, self._config.model_config.served_model_name
        news = self.scheduler.news
        unsupported = tuple(self._unsupported)
        is_starting = not (self.scheduler.shares or unsupported or self._passing)
        if is_starting:
            unsupported = ("starting: the workers have not reported yet",)
        return ReplicaInfo(
            epoch=self.events.epoch,
            model=str(names[0] if isinstance(names, list) else names),
            versions={
                "vllm": self._vllm_version,
                "torch": importlib.metadata.version("torch"),
                "kvshare": kvshare.__version__,
            },
            refusals=unsupported,
            warnings=(*self._warnings, *(news.warnings if news is not None else ())),
            can_move_keys=self.scheduler.may_move_keys,
            # Empty while starting: the proxy then asks again.
            namespace_fields={} if is_starting else self._namespace_fields(),
            can_share_media=self.scheduler.media_rules.are_shared,
            can_choose=all(worker.can_listen for worker in self._handshakes),
            fingerprint=self._handshakes[0].fingerprint if self._handshakes else "",
            device=_named(worker.device for worker in self._handshakes),
            bytes_per_token=self.scheduler.saving.bytes_per_token,
            max_bytes=self.segments.max_bytes,
            num_bytes=self.segments.num_bytes,
            num_segments=len(self.segments.ids()),
            max_model_len=config.model_config.max_model_len,
            settings=self._settings(),
            max_disk_bytes=self.segments.disk.max_bytes if self.scheduler.disk.is_on else 0,
            num_disk_segments=len(self.segments.disk),
            disk_problem=self.scheduler.disk.problem,
            data_parallel_rank=self._rank,
            has_own_disk=self.scheduler.disk.has_files,
            shared_store=news.place if news is not None else "",
            is_listing=news is not None and news.is_listing,
            speculation=method_of(config),
            passing=self._passing or "",
            data_parallel_size=max(self._connector.data_parallel_size, 1 + (self._rank or 0)),
        )

    def _namespace_fields(self) -> dict[str, str]:
        model = self._config.model_config
        first = self._handshakes[0] if self._handshakes else None
        heads = sum(worker.num_kv_heads for worker in self._handshakes)
        layout = f"{first.num_layers}x{heads}x{first.head_dim}" if first else ""
        mixed = "+".join(worker.kv_planes for worker in self._handshakes if worker.kv_planes)
        return {
            "model": model.model,
            "revision": "+".join(worker.weights for worker in self._handshakes),
            "tokenizer": joined((model.tokenizer, model.tokenizer_revision or ""), by="@")
            + media_settings(model),
            "dtype": first.dtype if first else "",
            "kv_layout": mixed or layout,
            "rope": first.rope if first else "",
        }

    def _step_tokens(self) -> int:
        """Return how many tokens joining loads may compute in a step; 0 if none joins, see `joining.py`."""
        limits = self._config.scheduler_config
        step_tokens = self._connector.step_tokens or int(limits.max_num_batched_tokens)
        return step_tokens if self._config.max_concurrent_batches > 1 else 0

    def _settings(self) -> dict[str, Any]:
        config = self._config
        transfer = config.kv_transfer_config
        return {
            "kv_load_failure_policy": transfer.kv_load_failure_policy if transfer else "",
            "worker_cls": str(config.parallel_config.worker_cls),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "copies_in_gpu_memory": self.scheduler.donors.are_found,
            "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "block_size": config.cache_config.block_size,
            "structured_outputs_backend": config.structured_outputs_config.backend,
            "attention_backend": self._handshakes[0].attention_backend if self._handshakes else "",
        }


def _named(devices: Iterable[str]) -> str:
    """Name each kind of device once, with the number of ranks that have one if there are several."""
    counted = Counter(devices)
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counted.items())
