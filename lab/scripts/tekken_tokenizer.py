"""
Writes Mistral's Tekken tokenizer (131,072 tokens, many languages) as a folder that `--tokenizer` takes.

    .venv/bin/python lab/scripts/tekken_tokenizer.py FOLDER

The tokenizer is part of mistral_common, which `make test` installs with vLLM: nothing is downloaded. The
bundled demo model's own tokenizer is small and English, and cuts other scripts into single bytes.
"""

from importlib.resources import files
from pathlib import Path

import typer
from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer


def main(folder: Path) -> None:
    """Write Mistral's Tekken tokenizer into FOLDER."""
    source = files("mistral_common") / "data" / "tekken_240911.json"
    convert_tekken_tokenizer(str(source)).save_pretrained(folder)


if __name__ == "__main__":
    typer.run(main)
