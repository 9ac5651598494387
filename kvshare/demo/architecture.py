"""
The demo model before training: its size, and the head start it gets.

Owns the configuration and the initial weights. Knows nothing of forms or of the training loop.
"""

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvshare.demo.tokenizer import MAX_TOKENS

ROPE_THETA = 100_000.0
EMBEDDING_STD = 0.06
CONSTANT = 0.36
"""What every embedding holds in its first coordinate; it shifts all logits alike."""
SHARPNESS = 6.7
"""Length of the constant part of queries and keys, per frequency."""
NUM_FREQUENCIES = 6
"""Only the fastest rotations can tell neighbouring positions apart."""


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A fresh Llama of about three million parameters with tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers has no hint
    look_back(model)
    return model


@torch.no_grad()
def look_back(model: LlamaForCausalLM) -> None:
    """
    Let head h of the first layer begin by attending to the token h + 1 places back.

    A model must know what stood just before a token to find a value by its label; learning
    that from nothing took most of the training time. A constant coordinate of the embedding
    gives every query and key the same direction, and the query's is turned back by h + 1
    positions. All weights stay free to change.
    """
    embedding = model.model.embed_tokens.weight
    torch.nn.init.normal_(embedding, std=EMBEDDING_STD)
    embedding[:, 0] = CONSTANT
    attention = model.model.layers[0].self_attn
    head_dim = attention.head_dim
    half = head_dim // 2
    after_norm = CONSTANT / math.sqrt(EMBEDDING_STD**2 + CONSTANT**2 / model.config.hidden_size)
    for head in range(model.config.num_attention_heads):
        for frequency in range(NUM_FREQUENCIES):
            angle = (head + 1) * ROPE_THETA ** (-frequency / half)
            real, imaginary = head * head_dim + frequency, head * head_dim + frequency + half
            scale = SHARPNESS / after_norm
            attention.k_proj.weight[real, 0] = scale
            attention.q_proj.weight[real, 0] = scale * math.cos(angle)
            attention.q_proj.weight[imaginary, 0] = -scale * math.sin(angle)
