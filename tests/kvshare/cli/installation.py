"""A Python environment of its own with a stand-in for vLLM, for what `kvshare vllm` starts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import kvshare
from tests.kvshare.cli.outcome import TIMEOUT_S, Outcome

EXIT_STATUS = 7
STAND_IN = f"""
import importlib.metadata, json, os, sys
version = importlib.metadata.version("vllm")
told = {{"pid": os.getpid(), "argv": sys.argv[1:], "home": os.environ.get("HF_HOME"), "version": version}}
print(json.dumps(told))
sys.exit({EXIT_STATUS})
"""


@dataclass(frozen=True, slots=True)
class Installation:
    """A Python of its own that sees this one's packages behind its own, with a stand-in for vLLM."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Installation:
        venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
        seen = [
            sysconfig.get_path("purelib"),
            sysconfig.get_path("platlib"),
            Path(kvshare.__file__).parents[1],
        ]
        installation = cls(folder)
        (installation.packages / "seen.pth").write_text("".join(f"{path}\n" for path in seen))
        return installation

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def program(self) -> Path:
        return self.folder / "bin" / "vllm"

    @property
    def packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def put_program(self) -> None:
        self.program.write_text(f"#!{self.python}\n{STAND_IN}")
        self.program.chmod(0o755)

    def put_package(self, version: str, *, name: str = "vllm") -> None:
        """A `vllm` that can be run, from a distribution of this name."""
        module = self.packages / "vllm" / "entrypoints" / "cli"
        module.mkdir(parents=True)
        for folder in (module, module.parent, module.parent.parent):
            (folder / "__init__.py").touch()
        (module / "main.py").write_text(STAND_IN)
        facts = self.packages / f"{name.replace('-', '_')}-{version}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (facts / "top_level.txt").write_text("vllm\n")

    def hide_package(self) -> None:
        """No `vllm` can be imported, whatever is installed."""
        (self.packages / "sitecustomize.py").write_text("import sys\nsys.modules['vllm'] = None\n")

    def start(self, *arguments: object, **env: str) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSHARE_")}
        return subprocess.Popen(
            [self.python, "-m", "kvshare.cli.main", *map(str, arguments)],
            env={**clean, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: object, **env: str) -> Outcome:
        with self.start("vllm", *arguments, **env) as process:
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        return Outcome(process.returncode, stdout, stderr)

    def printed(self, *arguments: object, **env: str) -> list[str]:
        """The words of the command that would be run, from `serve` on."""
        outcome = self.run(*arguments, "--print-command", **env)
        assert outcome.code == 0, outcome.stderr
        words = shlex.split(outcome.stdout)
        return words[words.index("serve") :]
