"""
What `kvshare doctor` looks at: one small function per question, each answering with a `Check`. What it may
find is in doctor.yaml.

Here: the machine, the config and the model. `store_checks` and `server_checks` ask the rest. No check loads
weights, talks to the internet or leaves a file behind.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshare.addresses import is_own, joined, reachable, try_port
from kvshare.errors import ConfigError, ModelError
from kvshare.tables import read_table

if TYPE_CHECKING:
    from kvshare.settings import Settings


class CheckState(StrEnum):
    OK = "ok"
    WARN = "warn"  # it serves, but not as it could
    FAIL = "fail"  # it does not serve


@dataclass(frozen=True, slots=True)
class Check:
    """A check: what was looked at, what was found, and what to do if it is not fine."""

    name: str
    state: CheckState
    detail: str
    remedy: str = ""


_FINDINGS = read_table(Path(__file__).with_name("doctor.yaml"))


def found(finding: str, **words: object) -> Check:
    """A finding of doctor.yaml, as "port.taken": the name of the check, and what came of it."""
    name, _, kind = finding.partition(".")
    state, *texts = _FINDINGS[name][kind]
    return Check(name, CheckState(state), *(text.format(**words) for text in texts))


def check_torch() -> Check:
    """torch can be imported, and what it computes on."""
    try:
        import torch
    except (ImportError, OSError) as exc:
        return found("torch.broken", problem=exc)
    cpu = f"CPU, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return found("torch.computes", version=torch.__version__, where=where)


def check_sqlite(version: tuple[int, int, int]) -> Check:
    """SQLite has no known bug that corrupts a WAL database: two connections that write at once."""
    from delta_tree.storage import journal_mode_for

    fine = journal_mode_for(version) == "WAL"
    return found("sqlite.fine" if fine else "sqlite.wal reset", version=".".join(map(str, version)))


def check_config(path: Path | None) -> tuple[Settings | None, Check]:
    """The settings, if they are valid, and so is the file of keys."""
    from kvshare.settings import access_of, load_settings

    try:
        settings = load_settings(path)
        access_of(settings)
        return settings, found("config.read", where=path or "the defaults")
    except ConfigError as exc:
        return None, found("config.wrong", problem=exc)


def check_ports(settings: Settings, url: str | None = None) -> list[Check]:
    """The server's addresses can be listened on, or the server at `url` does."""
    host, named = settings.server.host, {"server.port": settings.server.port}
    if settings.server.admin_port is not None:
        named["server.admin_port"] = settings.server.admin_port
    is_asked = url is not None and is_own(url, host, named.values())
    return [_check_port(host, port, setting, is_asked=is_asked) for setting, port in named.items()]


def _check_port(host: str, port: int, setting: str, *, is_asked: bool) -> Check:
    from kvshare.cli.client import is_kvshare

    where = joined(host, port)
    try:
        try_port(host, port)
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            return found("port.refused", where=where, problem=exc.strerror or exc)
        if not is_kvshare(f"http://{joined(reachable(host), port)}"):
            return found("port.taken", where=where, problem=exc.strerror or exc, setting=setting)
        return found("port.asked" if is_asked else "port.ours", where=where, setting=setting)
    return found("port.free", where=where)


def check_pages(settings: Settings) -> Check:
    """Check which web pages of other origins may call the server."""
    origins = settings.server.cors_origins
    if "*" in origins:
        asks_for_keys = settings.auth.keys or settings.auth.keys_file is not None
        return found("pages.any with keys" if asks_for_keys else "pages.any")
    return found("pages.listed", origins=", ".join(origins)) if origins else found("pages.none")


def check_model(settings: Settings) -> Check:
    """The model's configuration is here; its weights are not read."""
    from kvshare import chat_model

    if settings.model.path is None and not chat_model.is_prepared():
        return found("model.to download", name=chat_model.NAME)
    try:
        config = _model_config(settings)
    except ModelError as exc:
        return found("model.missing", problem=exc)
    return found("model.found", path=model_path(settings), kind=config.model_type)


def check_tokenizer(settings: Settings) -> Check:
    """The tokenizer loads and has a chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path(settings), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as exc:
        return found("tokenizer.missing", problem=first_line(exc))
    complete = bool(tokenizer.chat_template)
    return found("tokenizer.complete" if complete else "tokenizer.no template", num_tokens=len(tokenizer))


def check_geometry(settings: Settings) -> Check:
    """KV of this kind of model can be moved: tested on one layer of each kind with random weights."""
    from kvshare.embedded.loading import served

    try:
        model = served(_smallest(_model_config(settings)), name="the model")
    except ModelError as exc:
        return found("geometry.wrong", problem=exc)
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as exc:
        return found("geometry.not tested", problem=first_line(exc))
    if not model.can_share:
        return found("geometry.unshared", reason=model.unsupported_reason)
    if model.unsupported_reason:
        return found("geometry.fixed", reason=model.unsupported_reason)
    return found("geometry.moves")


def model_path(settings: Settings) -> str:
    """The folder or name of the model that would be served now, without a download."""
    from kvshare import chat_model
    from kvshare.served_model import DEMO, find_model

    chosen = settings.model.path
    return find_model(DEMO if chosen is None and not chat_model.is_prepared() else chosen).path


def _model_config(settings: Settings) -> Any:
    from transformers import AutoConfig

    path = model_path(settings)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"{path}: {first_line(exc)}") from exc


def _smallest(config: Any) -> Any:
    """A model of the same attention geometry with a layer of each kind, and random weights."""
    from transformers import AutoModelForCausalLM

    kinds = list(getattr(config, "layer_types", None) or ())
    num_layers = 1 + max((kinds.index(kind) for kind in kinds), default=0)
    changes: dict[str, Any] = {"num_hidden_layers": num_layers, "vocab_size": min(config.vocab_size, 256)}
    changes |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if kinds:
        changes["layer_types"] = kinds[:num_layers]
    if getattr(config, "intermediate_size", None):
        changes["intermediate_size"] = 64
    smallest = type(config)(**{**config.to_dict(), **changes})
    return AutoModelForCausalLM.from_config(smallest)  # type: ignore[no-untyped-call]  # transformers has none


def first_line(error: Exception) -> str:
    """An error in one line."""
    return (str(error) or type(error).__name__).splitlines()[0]
