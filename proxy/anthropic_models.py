"""
The list of models as clients of Anthropic's API expect it: they ask for `/v1/models` with the header
`anthropic-version`. Everyone else gets OpenAI's form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from kvshare.admin import checked
from kvshare.errors import RequestError

_MOST = 1000


@dataclass(frozen=True, slots=True)
class PageQuestion:
    """The requested part of the list: the models after one, or before one, by their ids."""

    __pydantic_config__ = ConfigDict(extra="ignore")
    limit: Annotated[int, Field(ge=1, le=_MOST)] = 20
    after_id: str | None = None
    before_id: str | None = None

    def page_of(self, cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The page of these models, each as OpenAI's form has it. Raises RequestError for an unknown id."""
        models = [model_of(card) for card in cards]
        ids = [model["id"] for model in models]
        if self.before_id is not None:
            rest = models[: _place(ids, "before_id", self.before_id)]
            page = rest[-self.limit :]
        else:
            first = 0 if self.after_id is None else _place(ids, "after_id", self.after_id) + 1
            rest = models[first:]
            page = rest[: self.limit]
        return {
            "data": page,
            "has_more": len(page) < len(rest),
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
        }


def page_of(cards: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The page that a query asks for. Raises RequestError that names what is wrong."""
    return checked(PageQuestion, dict(query)).page_of(cards)


def model_of(card: Mapping[str, Any]) -> dict[str, Any]:
    """One model. `card`: the same in OpenAI's form."""
    length, seconds = card.get("max_model_len"), card.get("created")
    created = datetime.fromtimestamp(seconds if isinstance(seconds, int) else 0, UTC)
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,  # prompt and answer share one limit
    }


def _place(ids: Sequence[str], name: str, model_id: str) -> int:
    if model_id not in ids:
        raise RequestError(f"{name}: expected the id of a model that is listed", param=name)
    return ids.index(model_id)
