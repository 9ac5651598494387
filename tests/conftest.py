"""Shared by all tests: no hub is ever reached, and torch leaves a core to the server under test."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
