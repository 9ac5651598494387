"""KVShare: the KV cache of similar prompts, shared between the users of an LLM service."""

__version__ = "0.3.0"
