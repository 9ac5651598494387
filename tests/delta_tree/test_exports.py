"""The package as others see it."""

import subprocess
import sys


def test_no_heavy_library_comes_along() -> None:
    """Importing the tree loads no tensors, no HTTP and no vector index."""
    foreign = "{'torch', 'transformers', 'aiohttp', 'qdrant_client', 'kvshare', 'vector_index'}"
    program = f"import sys, delta_tree; sys.exit(bool({foreign} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
