"""
`kvshare vllm`: stock `vllm serve`, started with the settings of KVShare's connector. Imports no vLLM.

A launcher: this process becomes vLLM, so that signals and exit status are vLLM's. The options of this
command are taken out wherever they stand; everything else is vLLM's, passed on untouched and in order.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from kvshare.cli import options
from kvshare.cli.connector_options import connector_options, disk_settings, shared_settings
from kvshare.cli.output import note
from kvshare.errors import EngineError

CONTEXT_SETTINGS = {"ignore_unknown_options": True, "help_option_names": []}  # so that -dph is not read as -h

_HELP = ("--help", "-h")
_VLLM_PORT = 8000  # vLLM's default
# What this command gives itself, and an option with which vLLM would replace the connector.
_TAKEN = ("kv-transfer-config", "worker-cls", "kv-offloading-size")
_ONE_GROUP = "--disable-hybrid-kv-cache-manager"
_RENDERS = "--enable-scale-out"  # vLLM's /render routes, which say what tokens a request has
# vLLM's options for data parallelism by their short names.
_SHORT = {
    f"-dp{letter}": f"data-parallel-{end}"
    for letter, end in [
        *(("", "size"), ("n", "rank"), ("r", "start-rank"), ("l", "size-local"), ("b", "backend")),
        *(("h", "hybrid-lb"), ("e", "external-lb"), ("m", "multi-port-external-lb")),
    ]
}
_SPREAD = [_SHORT[f"-dp{letter}"] for letter in "nrlhem"]  # ranks behind several APIs or on several machines


def vllm(
    context: typer.Context,
    arguments: options.VllmArguments,
    control_host: options.ControlHost = "127.0.0.1",
    control_port: options.ControlPort = None,
    kv_bytes: options.KvBytes = 4 * 1024**3,
    disk: options.Disk = None,
    disk_bytes: options.DiskBytes = None,
    shared_tier: options.SharedTier = None,
    beside: options.Beside = None,
    print_command: options.PrintCommand = False,
) -> None:
    """
    Start `vllm serve` with KVShare's connector. Options that are not listed here are vLLM's.

    --help after MODEL shows vLLM's. With KVSHARE_VLLM_TOKEN set, the connector asks for that token.
    """
    from kvshare.vllm_protocol.versions import program

    if arguments[0] in _HELP:
        typer.echo(context.get_help())
        return
    vllm_options = given_options(arguments)
    port = control_port if control_port is not None else _next_port(vllm_options.get("port", _VLLM_PORT))
    ranks = _num_ranks(vllm_options, port)
    settings = connector_options(
        host=control_host,
        port=port,
        max_bytes=kv_bytes // ranks,
        ranks=ranks,
        below={
            **disk_settings(disk, disk_bytes, kv_bytes=kv_bytes, ranks=ranks),
            **shared_settings(shared_tier, kv_bytes=kv_bytes // ranks),
        },
        beside=beside,
    )
    _check_options(vllm_options, settings, control_host)
    _check_version()
    if not any(name.endswith(_RENDERS.removeprefix("--")) for name in vllm_options):
        settings.append(_RENDERS)
    # A model goes right after `serve`; ours go before the rest, so that what the user says comes last.
    num_models = 0 if arguments[0].startswith("-") else 1
    if _has_some_windows(arguments[0] if num_models else vllm_options.get("model", ""), vllm_options):
        settings.append(_ONE_GROUP)
        note(f"{_ONE_GROUP}: KV is shared only if vLLM retains that of windowed layers, too")
    command = [*program(), "serve", *arguments[:num_models], *settings, *arguments[num_models:]]
    if print_command:
        typer.echo(shlex.join(command))
        return
    _note_ports(control_host, port, ranks)
    _check_ports(vllm_options, control_host, range(port, port + ranks))
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(command[0], command)
    except OSError as exc:
        raise EngineError(f"{command[0]} cannot be run: {exc.strerror or exc}") from exc


def _note_ports(control_host: str, port: int, ranks: int) -> None:
    host = f"[{control_host}]" if ":" in control_host else control_host
    note(f"the connector will answer on http://{host}:{port}")
    if ranks > 1:
        note(
            f"and on the ports up to {port + ranks - 1}, one for each rank, which has its own KV. Start the "
            f"proxy with: kvshare serve --vllm-data-parallel-size {ranks}, or data_parallel_size: {ranks} in "
            "vllm.replicas"
        )


def _has_some_windows(model: object, vllm_options: Mapping[str, Any]) -> bool:
    """
    Return whether some layers of a model see all earlier tokens and the others a window.

    By default vLLM manages the KV of such layers apart and frees what is outside the window. Of a model whose
    configuration cannot be read vLLM reports the error.
    """
    if any(name.endswith(_ONE_GROUP.removeprefix("--")) for name in vllm_options):
        return False
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(model), revision=vllm_options.get("revision"))
    except Exception:  # noqa: BLE001  vLLM will say what is wrong with it
        return False
    own = config.get_text_config()  # a multimodal model has its layer types there
    return set(getattr(own, "layer_types", None) or ()) == {"full_attention", "sliding_attention"}


def given_options(arguments: Sequence[str]) -> dict[str, Any]:
    """
    vLLM's long options by name, the last one winning; those of its --config file come first, as in vLLM.

    As vLLM reads them: dashes for underscores, and `--name.key` belongs to `name`. Of its short options only
    those for data parallelism count.
    """
    vllm_options: dict[str, Any] = {}
    for each, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = each.partition("=")
        if each.startswith("--") or name in _SHORT:
            vllm_options[_SHORT.get(name) or _name(name)] = value if equals else following
    return {**_file_options(vllm_options.get("config")), **vllm_options}


def _file_options(path: str | None) -> dict[str, Any]:
    """Read vLLM's --config file. If it cannot be read, vLLM reports that."""
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {_name(str(key)): value for key, value in document.items()} if isinstance(document, dict) else {}


def _name(option: str) -> str:
    return option.removeprefix("--").partition(".")[0].replace("_", "-")


def _check_options(vllm_options: Mapping[str, Any], settings: Sequence[str], control_host: str) -> None:
    """Raises a usage error for what this command gives itself, and for what KVShare cannot follow."""
    from kvshare.loopback import is_loopback
    from kvshare.vllm_protocol.messages import TOKEN_VARIABLE

    for name in vllm_options:
        # argparse takes an option's unambiguous beginning for the option
        if name and any(taken.startswith(name) for taken in _TAKEN):
            raise typer.BadParameter(
                f"--{name} would undo what this command is for. Run vLLM yourself, with these settings and "
                f"yours in one:\n  vllm serve MODEL {shlex.join(settings)}"
            )
    # The proxy names a rank in a header, which counts where all ranks of a vLLM are behind one API.
    named = [f"--{name}" for name in vllm_options if name in _SPREAD]
    if vllm_options.get("data-parallel-backend") == "ray":
        named.append("--data-parallel-backend ray")
    if named:
        raise typer.BadParameter(
            f"{' and '.join(named)}: KVShare follows the ranks of one vLLM on one machine, that is "
            "--data-parallel-size alone; else start one `kvshare vllm` per rank or machine, and give "
            "`kvshare serve` a --vllm-url for each"
        )
    if not is_loopback(control_host) and not os.environ.get(TOKEN_VARIABLE):
        raise typer.BadParameter(
            f"{control_host} can be reached from other machines, and the connector reports what was "
            f"generated: set {TOKEN_VARIABLE} to a secret, here and for `kvshare serve`, or stay on "
            "127.0.0.1",
            param_hint="--control-host",
        )


def _num_ranks(given: Mapping[str, Any], port: int) -> int:
    """Return the number of data-parallel ranks; 1 for a value that vLLM will refuse. Raises a usage error."""
    text = str(given.get("data-parallel-size", 1))
    ranks = int(text) if text.isdecimal() and int(text) else 1
    if port + ranks - 1 > 65535:
        raise typer.BadParameter(
            f"{ranks} ranks need as many control ports, {port} and those after it",
            param_hint="--control-port",
        )
    return ranks


def _next_port(port: object) -> int:
    text = str(port)
    if text.isdecimal() and 0 < int(text) < 65535:
        return int(text) + 1
    raise typer.BadParameter(
        f"give --control-port too: there is no next port after {text!r}", param_hint="--port"
    )


def _check_ports(vllm_options: Mapping[str, Any], control_host: str, control_ports: range) -> None:
    """Tries what vLLM and the connector would listen on only when the model is loaded."""
    from kvshare.addresses import check_port

    text, other = str(vllm_options.get("port", _VLLM_PORT)), "stop what listens there, or give another"
    has_own = text.isdecimal() and 0 < int(text) <= 65535 and not {"uds", "headless"} & vllm_options.keys()
    if has_own and int(text) in control_ports:
        raise typer.BadParameter(f"{text} is vLLM's own --port", param_hint="--control-port")
    if has_own:
        host = str(vllm_options.get("host") or "0.0.0.0")  # as vLLM does
        check_port(host, int(text), setting="vLLM's --port", remedy=f"{other} --port")
    for rank, port in enumerate(control_ports):
        which = f", which counts up to rank {rank}" if rank else ""
        remedy = f"{other} --control-port, here and for the proxy (--vllm-control-url)"
        check_port(control_host, port, setting=f"--control-port{which}", remedy=remedy)


def _check_version() -> None:
    from kvshare.vllm_protocol.versions import installed_version, only_read, untested

    version = installed_version()
    if version is None:
        raise EngineError(
            f"vllm is not installed in the environment of kvshare: run {sys.executable} -m pip install "
            "'.[vllm]' in the checkout of KVShare (without a GPU: see docs/vllm.md)"
        )
    reason = untested(version)
    if reason is not None:
        note(f"WARNING: {reason}. Sharing may be refused or fail; install a tested one for production.")
    elif (reason := only_read(version)) is not None:
        note(f"{reason}.")
