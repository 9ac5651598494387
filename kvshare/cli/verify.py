"""`kvshare verify`: which KV of a model can be shared, tested on the model itself, layer by layer."""

from __future__ import annotations

from typing import Annotated

import typer

from kvshare.cli.options import Format, OutputFormat, argument, option
from kvshare.cli.output import show
from kvshare.extras import require


def verify(
    model: Annotated[str, argument("verify", "model")] = "default",
    dtype: Annotated[str, option("verify", "--dtype")] = "float32",
    device: Annotated[str, option("verify", "--device")] = "auto",
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """
    Load a model and test how each layer's KV moves to other positions, and how far the layer sees.

    A model with a state, or with another kind of attention, is served and shares nothing. vLLM tests the
    same on its own model when it starts; `kvshare doctor --vllm-url` says what came of it.
    """
    if dtype not in (allowed := ("float32", "bfloat16", "float16", "auto")):
        raise typer.BadParameter(f"expected {', '.join(allowed)}, got {dtype!r}", param_hint="--dtype")
    require("embedded", what="`kvshare verify`")
    from kvshare.engines.embedded.decoder import load_network
    from kvshare.engines.embedded.loading import served, verification_document
    from kvshare.served_model import find_model

    source = find_model(model, download=True)
    loaded = served(load_network(source.path, device=device, dtype=dtype), name=source.name)
    show("verify", verification_document(loaded), output_format)
