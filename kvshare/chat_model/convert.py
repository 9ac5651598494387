"""
`python -m kvshare.chat_model.convert GGUF FOLDER` converts weights, tokenizer and chat template of a GGUF
file into a folder in Hugging Face format, with weights in bfloat16, for transformers and vLLM.

It is a program of its own because it needs a gigabyte of memory, which a server would not get back.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging


def convert(gguf: Path, folder: Path) -> None:
    """Raises what transformers raises for a file that it cannot read."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # ships no types
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    # transformers 5.19 treats the model as quantised: it would neither save it nor load the folder.
    del config.quantization_config
    for name in ("_name_or_path", "_model_name_or_path"):
        if hasattr(config, name):
            setattr(config, name, "")
    plain: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
