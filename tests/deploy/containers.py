"""What deploy/ starts: each process of ours with its arguments, environment and settings file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
IMAGES = {"kvshare": "Dockerfile", "kvshare-proxy": "Dockerfile.proxy", "kvshare-vllm": "Dockerfile.vllm"}
"""The names under which docs/deploying.md builds the images."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of ours: `kvshare` with these arguments. `settings`: what its --config names."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    settings: str | None = None
    image: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def command(self) -> str:
        return self.arguments[0]

    def value_of(self, option: str) -> str:
        """The value of --option=value or --option value."""
        text = "\n".join(self.arguments)
        found = re.search(rf"^{option}[=\n](.+)$", text, re.MULTILINE)
        assert found is not None, f"{self.name} has no {option}"
        return found[1]


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Each instruction of a Dockerfile with its arguments, continued lines joined."""
    text = (DEPLOY / dockerfile).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    words = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(word, rest.strip()) for word, _, rest in words]


def image_environment(dockerfile: str) -> dict[str, str]:
    """What its ENV sets."""
    pairs = (shlex.split(rest) for word, rest in instructions(dockerfile) if word == "ENV")
    return dict(pair.split("=", 1) for each in pairs for pair in each)


def compose() -> dict[str, Any]:
    """deploy/compose.yaml."""
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    return document


def interpolated(value: str) -> str:
    """As compose does it: ${NAME:-default} is the default, ${NAME:?what is wrong} a secret."""
    return re.sub(r"\$\{\w+:([-?])([^}]*)\}", lambda found: found[2] if found[1] == "-" else "secret", value)


def documents() -> list[dict[str, Any]]:
    """Those of Kubernetes, without the kustomization."""
    names = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    return [each for name in names for each in yaml.safe_load_all((KUBERNETES / name).read_text("utf-8"))]


def pods() -> dict[str, dict[str, Any]]:
    """Each workload of Kubernetes by its name."""
    return {each["metadata"]["name"]: each for each in documents() if "template" in each.get("spec", {})}


def unit(name: str) -> list[tuple[str, str]]:
    """The lines of a unit of systemd."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    return re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)


def processes() -> list[Process]:
    """All of them."""
    return [*_of_images(), *_of_compose(), *_of_kubernetes(), *_of_units()]


def _of_images() -> Iterator[Process]:
    for image, dockerfile in IMAGES.items():
        arguments = next(rest for word, rest in instructions(dockerfile) if word == "CMD")
        yield Process(
            dockerfile, tuple(yaml.safe_load(arguments)), image_environment(dockerfile), image=image
        )


def _of_compose() -> Iterator[Process]:
    for name, service in compose()["services"].items():
        if service["image"] in IMAGES:
            environment = {key: interpolated(value) for key, value in service["environment"].items()}
            environment = image_environment(IMAGES[service["image"]]) | environment
            files = [text.split(":") for text in service.get("volumes", ()) if text.startswith("./")]
            paths = {inside: (DEPLOY / outside).read_text("utf-8") for outside, inside, _ in files}
            settings = _settings(service["command"], paths)
            arguments = tuple(service["command"])
            yield Process(f"compose {name}", arguments, environment, settings, service["image"], service)


def _of_kubernetes() -> Iterator[Process]:
    maps = {each["metadata"]["name"]: each["data"] for each in documents() if each["kind"] == "ConfigMap"}
    for name, workload in pods().items():
        pod = workload["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {each["name"]: each for each in pod["volumes"]}
        paths = {
            f"{mount['mountPath']}/{file}": text
            for mount in container["volumeMounts"]
            for file, text in maps.get(
                volumes.get(mount["name"], {}).get("configMap", {}).get("name"), {}
            ).items()
        }
        environment = image_environment(IMAGES[container["image"]])
        environment |= {each["name"]: "secret" for each in container["env"]}
        settings = _settings(container["args"], paths)
        arguments = tuple(container["args"])
        yield Process(f"kubernetes {name}", arguments, environment, settings, container["image"], container)


def _of_units() -> Iterator[Process]:
    for name in ("kvshare.service", "kvshare-vllm.service"):
        lines = unit(name)
        _, *arguments = shlex.split(dict(lines)["ExecStart"])
        environment = dict(value.split("=", 1) for key, value in lines if key == "Environment")
        paths = {"/etc/kvshare/settings.yaml": (DEPLOY / "settings.yaml").read_text("utf-8")}
        yield Process(name, tuple(arguments), environment, _settings(arguments, paths))


def _settings(arguments: list[str], paths: Mapping[str, str]) -> str | None:
    return paths[arguments[arguments.index("--config") + 1]] if "--config" in arguments else None
