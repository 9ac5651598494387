"""Sizes as people write them: with a unit, as in settings and on the command line."""

import re

EXPECTED_SIZE = "expected a size such as 4GiB, 500MB or 1073741824"


def parse_size(text: str) -> int:
    """Bytes of 4GiB, 1.5 GB, 500MB or 1073741824; KiB is 1024, kB 1000. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*(?:([kmgt])(i?)b|b?)", text.strip().lower())
    if match is None or ("." in match[1] and match[2] is None):
        raise ValueError(EXPECTED_SIZE)
    unit = (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
