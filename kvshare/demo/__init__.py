"""
The demo model that ships with KVShare, the text it was trained on, and how it was trained.

Importing this package loads neither torch nor transformers; it only says where the model lies.
"""

from pathlib import Path

MODEL_PATH = Path(__file__).parent / "model"
"""The bundled model in Hugging Face format: load it with `AutoModelForCausalLM`."""
