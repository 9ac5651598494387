"""
Near-duplicate forms of the bundled model's own kind, as a log for `kvshare calibrate --model demo --log`.

    .venv/bin/python scripts/forms_log.py forms.jsonl --pairs 400
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from kvshare.demo.pairs import near_duplicate_pairs

SEED = 40_000  # neither of training nor of `kvshare bench demo`


def main(out: Path, *, pairs: Annotated[int, typer.Option(min=1)] = 400) -> None:
    """Write a donor and an edit of it, pair by pair."""
    with out.open("w", encoding="utf-8") as file:
        for pair in near_duplicate_pairs(SEED, pairs):
            for messages in (pair.donor_messages, pair.recipient_messages):
                file.write(json.dumps({"messages": list(messages)}) + "\n")


if __name__ == "__main__":
    typer.run(main)
