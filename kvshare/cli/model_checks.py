"""`kvshare doctor` on the model: its configuration, its tokenizer, and whether its keys can be moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvshare.cli.checks import Check, State, first_line
from kvshare.errors import ModelError

if TYPE_CHECKING:
    from kvshare.settings import Settings


def check_model(settings: Settings) -> Check:
    """The model's configuration is here; its weights are not read."""
    from kvshare import chat_model

    if settings.model.path is None and not chat_model.is_prepared():
        detail = f"{chat_model.NAME} is not here yet; `kvshare serve` downloads it once (93 MB)"
        remedy = "get it now: kvshare fetch-model. The checks below are of the bundled forms model"
        return Check("model", State.WARN, detail, remedy)
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
        return Check("tokenizer", State.FAIL, first_line(exc), "put the tokenizer's files beside the weights")
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
        return Check("geometry", State.WARN, f"not proved without weights: {first_line(exc)}", remedy)
    if model.rotation is None:
        remedy = "equal prefixes are still shared; choose a model with standard RoPE for the rest"
        return Check("geometry", State.WARN, model.rotation_refusal, remedy)
    return Check("geometry", State.OK, "keys can be moved")


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


def _one_layer_of(config: Any) -> Any:
    """A model of the same attention geometry, as small as it gets, with random weights."""
    from transformers import AutoModelForCausalLM

    changes: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": min(config.vocab_size, 256)}
    changes |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if getattr(config, "layer_types", None):
        changes["layer_types"] = config.layer_types[:1]
    if getattr(config, "intermediate_size", None):
        changes["intermediate_size"] = 64
    smallest = type(config)(**{**config.to_dict(), **changes})
    return AutoModelForCausalLM.from_config(smallest)  # type: ignore[no-untyped-call]  # transformers has none
