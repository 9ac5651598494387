"""What the suites share: the server under test, and what they ask it. They run in a client's environment."""

import os
from collections.abc import Mapping
from typing import Any

URL = os.environ["KVSHARE_URL"]
MODEL = os.environ["KVSHARE_MODEL"]
IS_EMBEDDED = os.environ["KVSHARE_ENGINE"] == "embedded"

QUESTION = "What is the weather in Bern? Then say it for Rome, too."
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Rome"]},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS},
}


def check_arguments(arguments: Mapping[str, object]) -> None:
    """They follow the tool's schema."""
    assert set(arguments) == {"city", "unit"}, arguments
    assert arguments["city"] in ("Bern", "Rome"), arguments
    assert arguments["unit"] in ("C", "F"), arguments
