"""
Runs the steps of a Dockerfile of deploy/ where there is no builder, in a folder that stands for the root.

    python scripts/run_recipe.py deploy/Dockerfile.proxy FOLDER

The stages share the folder, so that what one copies from another has the paths that it was installed with;
absolute paths of the recipe lie below it. `python` is the one that runs this script, and pip may use its
cache. What needs the rights of root (useradd, owners) is left out and listed. At a base image that is not
Python's the recipe ends: what it holds is not here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

CONTEXT = Path(__file__).resolve().parents[1]
_ROOTS = re.compile(r"(?<![\w./])(?=/(?:opt|source|wheel|var/lib)\b)")  # where paths of the image begin
_KEPT = re.compile(r"PIP_\w+|SSL_\w+|\w+_CA_BUNDLE|https?_proxy|HTTPS?_PROXY|HOME|LANG")
_NOTED = ("USER", "EXPOSE", "STOPSIGNAL")
_NEED_ROOT = ("useradd",)


@dataclass(slots=True)
class Image:
    """What stands in for an image. `left_out`: steps that were not run, as the Dockerfile has them."""

    root: Path
    context: Path = CONTEXT
    environment: dict[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)  # of the build
    workdir: PurePosixPath = field(default_factory=lambda: PurePosixPath("/"))
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def at(self, path: str | PurePosixPath) -> Path:
        """Where a path of the image, absolute or from its working directory, lies."""
        return self.root / (self.workdir / path).relative_to("/")

    def process_environment(self, **others: str) -> dict[str, str]:
        """The variables of the image and `others`, and of this process what pip needs."""
        kept = {name: value for name, value in os.environ.items() if _KEPT.fullmatch(name)}
        return {"PATH": os.defpath, **kept, **self.environment, **others}

    def run(self, words: list[str]) -> None:
        """Raises CalledProcessError."""
        subprocess.run(words, cwd=self.at("."), env=self.process_environment(), check=True)

    def placed(self, text: str) -> str:
        """The text with the paths of the image where they lie."""
        return _ROOTS.sub(str(self.root), text)


def build(dockerfile: Path, image: Image) -> Image:
    """Run the recipe. Raises CalledProcessError for a step that fails, ValueError for one that is unknown."""
    for word, rest in _instructions(dockerfile.read_text(encoding="utf-8")):
        if word == "FROM":
            if not rest.startswith("python:"):
                image.left_out.append(f"FROM {rest} and what follows")
                return image
            image.environment, image.workdir = {}, PurePosixPath("/")
        elif word not in _NOTED:
            _STEPS[word](image, rest)
    return image


def _instructions(text: str) -> list[tuple[str, str]]:
    """Each with its arguments, continued lines joined. Raises ValueError for one that is unknown."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = [line.split(maxsplit=1) for line in re.sub(r"\\\n\s*", "", lines).splitlines() if line.strip()]
    unknown = {word for word, _ in joined} - {"FROM", *_NOTED, *_STEPS}
    if unknown:
        raise ValueError(f"unknown instructions: {', '.join(sorted(unknown))}")
    return [(word, rest) for word, rest in joined]


def _workdir(image: Image, rest: str) -> None:
    image.workdir = image.workdir / rest
    image.at(".").mkdir(parents=True, exist_ok=True)


def _volume(image: Image, rest: str) -> None:
    image.at(rest).mkdir(parents=True, exist_ok=True)


def _copy(image: Image, rest: str) -> None:
    *names, target = rest.split()
    if names[0].startswith("--from="):
        if names[1:] != [target] or not image.at(target).exists():
            raise ValueError(f"COPY {rest}: expected a path of the stage before, copied to itself")
        return
    for name in names:
        source, place = image.context / name, image.at(target)
        if source.is_dir():
            shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            shutil.copy(source, place)


def _arg(image: Image, rest: str) -> None:
    if rest in image.arguments:
        image.environment[rest] = image.arguments[rest]


def _env(image: Image, rest: str) -> None:
    for pair in shlex.split(rest):
        name, _, value = pair.partition("=")
        image.environment[name] = image.placed(value).replace("$PATH", os.defpath)


def _run(image: Image, rest: str) -> None:
    for step in rest.split("&&"):
        program, *words = shlex.split(image.placed(step))
        if program in _NEED_ROOT:
            image.left_out.append(f"RUN {step.strip()}")
        elif program == "install":
            owners = {place for place, word in enumerate(words) if word in ("-o", "-g")}
            owners |= {place + 1 for place in owners}
            image.run([program, *(word for place, word in enumerate(words) if place not in owners)])
        elif program in ("python", "pip"):
            first = [sys.executable] if program == "python" else [sys.executable, "-m", "pip"]
            image.run([*first, *words])
        else:
            image.run([program, *(word for word in words if word != "--no-cache-dir")])


def _healthcheck(image: Image, rest: str) -> None:
    image.healthcheck = json.loads(rest.partition("CMD ")[2])


def _entrypoint(image: Image, rest: str) -> None:
    image.entrypoint = json.loads(rest)


def _command(image: Image, rest: str) -> None:
    image.command = json.loads(rest)


_STEPS = {
    "WORKDIR": _workdir,
    "VOLUME": _volume,
    "COPY": _copy,
    "ARG": _arg,
    "ENV": _env,
    "RUN": _run,
    "HEALTHCHECK": _healthcheck,
    "ENTRYPOINT": _entrypoint,
    "CMD": _command,
}


def main() -> None:
    """Build, and print what was left out and how it is started."""
    dockerfile, root = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    image = build(dockerfile, Image(root, arguments=dict(os.environ)))
    variables = [f"{name}={value}" for name, value in image.environment.items()]
    sys.stdout.writelines(f"left out: {step}\n" for step in image.left_out)
    sys.stdout.write(f"start: env {shlex.join([*variables, *image.entrypoint, *image.command])}\n")


if __name__ == "__main__":
    main()
