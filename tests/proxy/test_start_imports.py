"""What a server imports before it can listen: each module takes part of the time of its start."""

import json
import subprocess
import sys

_LOADED = "import json, sys, proxy.app; print(json.dumps(sorted(sys.modules)))"


def loaded_by_the_front() -> set[str]:
    """The modules of a new process that has imported the application."""
    return set(json.loads(subprocess.check_output([sys.executable, "-c", _LOADED], text=True)))


def test_the_front_loads_neither_engine() -> None:
    """The embedded one needs no relay, and a proxy no torch."""
    loaded = loaded_by_the_front()
    assert "proxy.generate.routes" in loaded
    tops = {name.partition(".")[0] for name in loaded}
    assert not tops & {"torch", "transformers", "sentence_transformers", "sklearn", "vllm", "pyarrow"}
    assert not {
        name for name in loaded if name.startswith(("kvshare.fleet", "proxy.relay", "kvshare.embedded"))
    }
