"""
The demo model before training: its size, and the head start it gets.

Owns the configuration and the initial weights. Knows nothing of forms or of the training loop.
"""

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaAttention

from kvshare.demo.tokenizer import MAX_TOKENS

ROPE_THETA = 100_000.0
EMBEDDING_STD = 0.06
CONSTANT = 0.36
"""What every embedding holds in its first coordinate; it shifts all logits alike."""
SHARPNESS = 6.7
"""Length of the constant part of queries and keys, per frequency."""
NUM_TURNED = 6
"""How many rotations tell neighbours apart; only the fastest can."""
NUM_FAST = 10
"""How many rotations are too fast for matching words over hundreds of tokens."""
MATCH = 6.0
"""How strongly equal words attract attention."""
COPY = 8.0
"""How loudly a copied word is said, compared with the last word of the prompt."""


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
    give_head_start(model)
    return model


@torch.no_grad()
def give_head_start(model: LlamaForCausalLM) -> None:
    """
    Let the model begin as a copying machine; all weights stay free to change.

    Head h of the first layer attends to the token h + 1 places back and notes it in a subspace
    of its own. Head h of the second layer looks for a place where the token h places back is
    noted there, so that all heads look behind an earlier run of the same tokens, and copies
    what stands at that place. Learning this from nothing took longer than all the rest.
    """
    width, num_heads = model.config.hidden_size, model.config.num_attention_heads
    head_dim = width // num_heads
    embedding = model.model.embed_tokens.weight
    torch.nn.init.normal_(embedding, std=EMBEDDING_STD)
    embedding[:, 0] = CONSTANT
    first, second = (model.model.layers[index].self_attn for index in (0, 1))
    _look_back(first, num_heads=num_heads, head_dim=head_dim)
    notes = torch.linalg.qr(torch.randn(width, width)).Q
    words = (torch.randn(head_dim, width) / math.sqrt(width)).repeat(num_heads, 1)
    copies = torch.randn(width, width) / math.sqrt(width)
    words[:, 0] = copies[:, 0] = 0.0  # the constant says nothing about the token
    sought = torch.cat((words[:head_dim], notes.T[:-head_dim]))
    noted = notes.T.clone()
    noted[:, 0] = sought[:, 0] = 0.0
    slow = (torch.arange(width) % (head_dim // 2) >= NUM_FAST).float()[:, None]
    first.v_proj.weight.copy_(words)
    first.o_proj.weight.copy_(EMBEDDING_STD * notes)
    second.q_proj.weight.copy_(MATCH * slow * sought)
    second.k_proj.weight.copy_(slow * noted)
    second.v_proj.weight.copy_(copies)
    second.o_proj.weight.copy_(COPY * EMBEDDING_STD * copies.T)


def _look_back(attention: LlamaAttention, *, num_heads: int, head_dim: int) -> None:
    """A constant coordinate gives all queries and keys one direction; the query's is turned."""
    half = head_dim // 2
    after_norm = CONSTANT / math.sqrt(EMBEDDING_STD**2 + CONSTANT**2 / (num_heads * head_dim))
    scale = SHARPNESS / after_norm
    for head in range(num_heads):
        for frequency in range(NUM_TURNED):
            angle = (head + 1) * ROPE_THETA ** (-frequency / half)
            real = head * head_dim + frequency
            attention.k_proj.weight[real, 0] = scale
            attention.q_proj.weight[real, 0] = scale * math.cos(angle)
            attention.q_proj.weight[real + half, 0] = -scale * math.sin(angle)
