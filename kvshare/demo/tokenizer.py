"""
The demo model's own byte-level BPE and chat template.

Every number from 0 to 99 is one token, with or without a space before it, so that a value is
the same token on the form and in the answer. Any UTF-8 text can be encoded: rare words fall
apart into bytes.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvshare.demo.questions import ask
from kvshare.demo.sheets import MAX_RECORDS, make_sheet, to_messages
from kvshare.demo.templates import FIRST_NAMES, LAST_NAMES, TEMPLATES

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (PAD, BEGIN, END, *ROLES)
VOCABULARY_SIZE = 1536
MAX_TOKENS = 4096
# Words with their leading space, at most two digits at a time, runs of marks, white space.
SPLIT = r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# An answer gets a leading space, so that it is the same tokens as its value on the form.
CHAT_TEMPLATE = (
    "<|begin|>"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|> {{ message['content'] | trim }}<|end|>"
    "{% elif message['role'] in ['system', 'user'] %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] | trim }}<|end|>"
    "{% else %}{{ raise_exception('unknown role ' ~ message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(seed: int, num_sheets: int = 400) -> PreTrainedTokenizerFast:
    """A tokenizer trained on generated sheets and questions; the same seed gives the same one."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_training_text(seed, num_sheets), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers has no hints
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in a model folder."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def encode_chat(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], *, reply: bool = False
) -> list[int]:
    """The token ids of a chat; with `reply`, up to where the assistant's answer begins."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=reply, tokenize=False)
    return list(tokenizer.encode(str(text), add_special_tokens=False))


def _training_text(seed: int, num_sheets: int) -> Iterator[str]:
    rng = random.Random(f"tokenizer-{seed}")
    for _ in range(num_sheets):
        sheet = make_sheet(rng, num_records=rng.randint(1, MAX_RECORDS))
        for message in to_messages(sheet, ask(rng, sheet).text):
            yield message["content"]
        yield from (ask(rng, sheet).text for _ in range(5))
    # The closed word lists and all numbers, often enough to become whole tokens.
    words = [word for template in TEMPLATES for word in template.word_field.words]
    words += [*FIRST_NAMES, *LAST_NAMES, *(str(number) for number in range(100))]
    yield from (" ".join(["", word] * 50) for word in words)
    yield from (f"{number}\n" * 50 for number in range(100))
