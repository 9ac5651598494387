"""
The demo model that ships with KVShare.

Importing this package loads neither torch nor transformers.
"""

from pathlib import Path

MODEL_PATH = Path(__file__).parent / "model"  # in Hugging Face format, for `AutoModelForCausalLM`
