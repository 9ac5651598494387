"""Builds the nominator that config.yaml describes."""

from __future__ import annotations

import os
from pathlib import Path

from kvshare.errors import ConfigError
from kvshare.settings import IndexSettings
from vector_index import Nominator
