"""A Python environment of its own with a stand-in for vLLM, for what `kvshare vllm` starts."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

import kvshare
from kvshare.cli import main
from kvshare.vllm_protocol import versions
from tests.kvshare.cli.outcome import TIMEOUT_S, Outcome

EXIT_STATUS = 7
STAND_IN = f"""
import importlib.metadata, json, os, sys
version = importlib.metadata.version("vllm")
told = {{"pid": os.getpid(), "argv": sys.argv[1:], "home": os.environ.get("HF_HOME"), "version": version}}
print(json.dumps(told))
sys.exit({EXIT_STATUS})
"""


@contextmanager
def captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """What is written to stdout and to stderr meanwhile."""
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        yield stdout, stderr


def become(program: str, command: Sequence[str]) -> NoReturn:
    """Instead of os.execv, which would end the tests: a process runs the program, this one ends like it."""
    done = subprocess.run(command, executable=program, capture_output=True, text=True, timeout=TIMEOUT_S)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    sys.exit(done.returncode)


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

    def run_apart(self, *arguments: object, **env: str) -> Outcome:
        """`kvshare vllm` as a process of this Python, to the end of what it becomes."""
        with self.start("vllm", *arguments, **env) as process:
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        return Outcome(process.returncode, stdout, stderr)

    def run(self, *arguments: object, **env: str) -> Outcome:
        """
        The same in this process, in a second less: it takes itself for that Python and sees its packages
        first. What it would become is run as a process and ends it.
        """
        words = ["kvshare", "vllm", *map(str, arguments)]
        with pytest.MonkeyPatch.context() as patch, captured() as (stdout, stderr):
            for name in [name for name in os.environ if name.startswith("KVSHARE_")]:
                patch.delenv(name)
            for name, value in env.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", words)
            patch.setattr(sys, "executable", str(self.python))
            patch.setattr(sys, "path", [str(self.packages), *sys.path])
            patch.setattr(os, "execv", become)
            patch.setattr(versions, "_distribution", versions._distribution.__wrapped__)  # keeps its answer
            with pytest.raises(SystemExit) as ended:
                main.main()
        return Outcome(int(ended.value.code or 0), stdout.getvalue(), stderr.getvalue())

    def printed(self, *arguments: object, **env: str) -> list[str]:
        """The words of the command that would be run, from `serve` on."""
        outcome = self.run(*arguments, "--print-command", **env)
        assert outcome.code == 0, outcome.stderr
        words = shlex.split(outcome.stdout)
        return words[words.index("serve") :]
