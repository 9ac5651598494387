"""
The checks of `kvshare doctor`: one small function per question, which answers with a `Check`.

Here: the machine, the config and the model. `store_checks`, `server_checks` (of vLLM) and `running_checks`
(of ours) ask the rest. No check loads weights, talks to the internet or leaves a file behind.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshare.addresses import is_own, joined, reachable, try_port
from kvshare.cli.check import Check, Checked
from kvshare.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from kvshare.settings import Settings


def check_torch() -> Check:
    """torch can be imported, and what it computes on."""
    try:
        import torch
    except (ImportError, OSError) as exc:
        return Checked.TORCH.fail(f"cannot be imported: {exc}", "reinstall it: pip install torch")
    cpu = f"CPU, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return Checked.TORCH.ok(f"{torch.__version__} on {where}")


def check_sqlite(version: tuple[int, int, int]) -> Check:
    """SQLite has no known bug that corrupts a WAL database: two connections that write at once."""
    from delta_tree.storage import journal_mode_for

    numbers = ".".join(map(str, version))
    if journal_mode_for(version) == "WAL":
        return Checked.SQLITE.ok(numbers)
    return Checked.SQLITE.ok(
        f"{numbers} has the WAL-reset bug (3.7.0 to 3.51.2); a store with one writer, such as KVShare's, "
        "is not affected"
    )


def check_config(path: Path | None) -> tuple[Settings | None, Check]:
    """The settings, if they are valid, and so is the file of keys."""
    from kvshare.settings import access_of, load_settings

    try:
        settings = load_settings(path)
        access_of(settings)
        return settings, Checked.CONFIG.ok(path or "the defaults")
    except ConfigError as exc:
        return None, Checked.CONFIG.fail(exc, "correct this key; config.yaml explains each")


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
        problem = f"{where}: {exc.strerror or exc}"
        if exc.errno != errno.EADDRINUSE:
            return Checked.PORT.fail(problem, "set server.host")
        if not is_kvshare(f"http://{joined(reachable(host), port)}"):
            return Checked.PORT.fail(problem, f"stop the server that listens there, or set {setting}")
        if is_asked:
            return Checked.PORT.ok(f"{where} is that of the running server at --url")
        return Checked.PORT.warn(
            f"{where}: a KVShare server runs there",
            f"to check that one, give its address with --url; a second one needs another {setting}",
        )
    return Checked.PORT.ok(f"{where} is free")


def check_pages(settings: Settings) -> Check:
    """Check which web pages of other origins may call the server."""
    origins = settings.server.cors_origins
    if "*" in origins:
        asks_for_keys = settings.auth.keys or settings.auth.keys_file is not None
        if asks_for_keys:
            return Checked.PAGES.ok("may call it from any origin, with a key")
        return Checked.PAGES.warn(
            "every web page may use the server from a browser that reaches it, as no key is needed",
            "list the origins in server.cors_origins, or configure auth.keys",
        )
    if origins:
        return Checked.PAGES.ok(f"may call it from {', '.join(origins)}")
    return Checked.PAGES.ok("no web page of another origin may call the server")


def check_model(settings: Settings) -> Check:
    """The model's configuration is here; its weights are not read."""
    from kvshare import chat_model

    if settings.model.path is None and not chat_model.is_prepared():
        return Checked.MODEL.warn(
            f"{chat_model.NAME} is not here yet; `kvshare serve` downloads it once (93 MB)",
            "get it now: kvshare fetch-model. The checks below are of the bundled forms model",
        )
    try:
        config = _model_config(settings)
    except ModelError as exc:
        return Checked.MODEL.fail(
            exc, "download the model, or set model.path to a folder in Hugging Face format"
        )
    return Checked.MODEL.ok(f"{model_path(settings)} ({config.model_type})")


def check_tokenizer(settings: Settings) -> Check:
    """The tokenizer loads and has a chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path(settings), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as exc:
        return Checked.TOKENIZER.fail(first_line(exc), "put the tokenizer's files next to the weights")
    tokens = f"{len(tokenizer):,} tokens"
    if tokenizer.chat_template:
        return Checked.TOKENIZER.ok(f"{tokens}, with a chat template")
    return Checked.TOKENIZER.warn(
        f"{tokens}, no chat template", "only /v1/completions can be served without one"
    )


def check_geometry(settings: Settings) -> Check:
    """KV of this kind of model can be moved: tested on one layer of each kind with random weights."""
    from kvshare.embedded.loading import served

    try:
        model = served(_smallest(_model_config(settings)), name="the model")
    except ModelError as exc:
        return Checked.GEOMETRY.fail(exc, "choose another model")
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as exc:
        return Checked.GEOMETRY.warn(
            f"cannot be tested without weights: {first_line(exc)}",
            "the server tests it on the real weights when it starts",
        )
    if not model.can_share:
        return Checked.GEOMETRY.warn(
            f"nothing is shared: {model.unsupported_reason}",
            "it is served unshared; docs/models.md lists what is shared of which",
        )
    if model.unsupported_reason:
        return Checked.GEOMETRY.warn(
            model.unsupported_reason,
            "text at the same position is still shared; `kvshare verify` shows each layer",
        )
    return Checked.GEOMETRY.ok("keys can be moved")


def model_path(settings: Settings) -> str:
    """Return the folder or name of the model that would be served now, without a download."""
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
    """Return a model of the same attention geometry with a layer of each kind, and random weights."""
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
    return (str(error) or type(error).__name__).splitlines()[0]
