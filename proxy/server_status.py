"""Describes a server and its parts as one JSON-ready document for operators: no text, no tokens."""

from __future__ import annotations

from dataclasses import asdict
from time import time
from typing import Any

from kvshare import __version__
from kvshare.engine import GeneratingEngine
from kvshare.reasons import explanations
from kvshare.requests import SharingMode
from kvshare.status import EngineStatus
from kvshare.telemetry import Counts
from proxy.context import ServerContext
from proxy.parts import part_documents, part_statuses


def status_document(server: ServerContext) -> dict[str, Any]:
    """Return the status of a server whose engine is up."""
    status, settings = server.engine.status(), server.settings
    return {
        "version": __version__,
        "model": server.engine.card.model_id,
        "engine": "embedded" if isinstance(server.engine, GeneratingEngine) else "vllm",
        "asks_for_keys": not server.keyring.is_open,
        "now": time(),
        "limits": {
            "mode": SharingMode.least(settings.sharing.mode, settings.sharing.max_mode),
            "default_mode": settings.sharing.mode,
            "max_mode": settings.sharing.max_mode,
            "max_deviation": settings.sharing.max_deviation,
            "max_risk": settings.sharing.max_risk,
            "min_prompt_tokens": settings.sharing.min_prompt_tokens,
        },
        "reasons": explanations(),
        "parts": part_documents(part_statuses(server, status), with_details=True),
        **_of_engine(status),
    }


def _of_engine(status: EngineStatus) -> dict[str, Any]:
    return {
        "ready": status.ready,
        "detail": status.detail,
        "num_running": status.num_running,
        "num_waiting": status.num_waiting,
        "num_nodes": status.num_nodes,
        "num_segments": status.num_segments,
        "max_depth": status.max_depth,
        "kv_bytes": status.kv_bytes,
        "kv_budget_bytes": status.kv_budget_bytes,
        "num_embedding": status.num_embedding,
        "index": None if status.index is None else asdict(status.index),
        "tiers": [asdict(tier) for tier in status.tiers],
        "replicas": [asdict(replica) for replica in status.replicas],
        "control": None if status.control is None else asdict(status.control),
        "shadow": None if status.shadow is None else asdict(status.shadow),
        **_counted(status.counts),
    }


def _counted(counts: Counts) -> dict[str, Any]:
    """Since the start."""
    return {
        "evictions": dict(counts.evictions),
        "fallbacks": [
            {"component": component, "reason": reason, "count": count}
            for (component, reason), count in counts.fallbacks.most_common()
        ],
        "replica_failures": dict(counts.replica_failures),
        "num_isolation_denials": counts.num_isolation_denials,
    }
