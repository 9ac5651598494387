"""
Writes Mistral's Tekken tokenizer (131,072 tokens, many languages) as a folder that `--tokenizer` takes.

    .venv/bin/python scripts/tekken_tokenizer.py FOLDER

It comes with mistral_common, which `make test` installs beside vLLM: nothing is fetched. The bundled demo
model's own tokenizer is English and small, and cuts other scripts into single bytes.
"""

import sys
from importlib.resources import files

from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    source = files("mistral_common") / "data" / "tekken_240911.json"
    convert_tekken_tokenizer(str(source)).save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
