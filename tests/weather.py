"""The parameters of a tool that the end-to-end tests offer to the real model."""

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Lyon"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
