"""A pool with the demo model's tokenizer."""

from collections.abc import AsyncIterator

import pytest_asyncio

from kvshare.grammar_pool.pool import GrammarPool
from tests.kvshare.grammar_pool.schemas import TOKENIZER


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[GrammarPool]:
    opened = GrammarPool(
        lambda: {"kind": "llguidance", "tokenizer": TOKENIZER, "vocab_size": 1536, "eos_token_ids": [2]}
    )
    yield opened
    opened.close()
