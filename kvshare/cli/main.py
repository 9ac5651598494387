"""The entry point of `kvshare`: wires the commands together and turns errors into exit codes."""

import sys
from typing import Annotated

import typer

from kvshare.cli import (
    config,
    doctor,
    models,
    replay,
    requests,
    serve,
    store,
    store_files,
    top,
    usage,
    vllm_command,
    warm,
)
from kvshare.cli.output import exit_code, hush
from kvshare.cli.plugins import CommandGroup
from kvshare.crash_report import report_crashes
from kvshare.errors import KVShareError

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,  # importing rich for --help doubles its time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 failed, 2 usage or config, 3 server unreachable.",
)


@app.callback()
def kvshare(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes on stderr; errors only.")] = False,
) -> None:
    """Shares the KV cache of similar prompts between the users of an LLM service."""
    if quiet:
        hush()


app.command("serve")(serve.serve)
app.command("vllm", context_settings=vllm_command.CONTEXT_SETTINGS)(vllm_command.vllm)
app.command("doctor")(doctor.doctor)
app.command("verify")(models.verify)
app.command("version")(doctor.version)
app.command("fetch-model")(models.fetch_model)
app.command("explain")(store.explain)
app.command("stats")(store.stats)
app.command("tiers")(store.tiers)
app.command("tree")(store.tree)
app.command("node")(store.node)
app.command("diff")(store.diff)
app.command("evict")(store.evict)
app.command("pin")(store.pin)
app.command("unpin")(store.unpin)
app.command("warm")(warm.warm)
app.command("hash-key")(serve.hash_key)
app.command("workload")(replay.workload)
app.add_typer(replay.app, name="replay")
app.add_typer(store_files.app, name="store")
app.command("top")(top.top)
app.command("requests")(requests.requests)
app.command("tenants")(usage.tenants)
app.command("usage")(usage.usage)
app.add_typer(config.app, name="config")


def main() -> None:
    """Run the command line; a KVShareError becomes one line on stderr and its exit code."""
    report_crashes()
    try:
        app()
    except KVShareError as exc:
        typer.echo(f"kvshare: {exc}", err=True)
        sys.exit(exit_code(exc))


if __name__ == "__main__":
    main()
