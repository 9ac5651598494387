"""`kvshare doctor` on the model: its configuration, its tokenizer, and whether its keys can be moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvshare.cli.checks import Check, first_line, found
from kvshare.errors import ModelError

if TYPE_CHECKING:
    from kvshare.settings import Settings


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
    """KV of this kind of model can be moved: proved on one layer with random weights."""
    from kvshare.engines.embedded.model import EmbeddedModel

    try:
        model = EmbeddedModel(_one_layer_of(_model_config(settings)), name="the model")
    except ModelError as exc:
        return found("geometry.wrong", problem=exc)
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as exc:
        return found("geometry.not proved", problem=first_line(exc))
    if model.rotation is None:
        return found("geometry.fixed", reason=model.rotation_refusal)
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
