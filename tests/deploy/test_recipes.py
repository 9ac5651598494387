"""Dockerfiles, compose, Kubernetes and systemd against the project and each other, without a builder."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvshare import __version__
from kvshare.cli.connector_options import parse_bytes
from kvshare.vllm_protocol.versions import only_read, untested
from tests.deploy.containers import (
    DEPLOY,
    IMAGES,
    KUBERNETES,
    ROOT,
    compose,
    documents,
    instructions,
    pods,
    processes,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = {"kvshare": ["embedded"], "kvshare-proxy": [], "kvshare-vllm": ["vllm"]}
"""By image, the extras that its process needs: docs/operating.md, what to install where."""
WEAKEST = {"kvshare.service": 20, "kvshare-vllm.service": 40}
"""The exposure that `systemd-analyze security` may find at most, in tenths; 100: nothing is restricted."""


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_made_of_what_the_wheel_needs(image: str) -> None:
    """Packages and files that the build reads are copied, exist, and are not ignored; nothing else is."""
    copied = {
        name
        for word, rest in instructions(IMAGES[image])
        if word == "COPY" and "--from" not in rest
        for name in rest.split()[:-1]
    }
    build = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*build["packages"], *build["force-include"], PROJECT["project"]["readme"], "pyproject.toml"}
    assert copied == needed | {"LICENSE", "constraints.txt"}
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[next(n for n, line in enumerate(ignored) if not line.startswith("#"))] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_the_extras_of_its_process(image: str) -> None:
    """And no other; each is in pyproject.toml."""
    runs = " ".join(rest for word, rest in instructions(IMAGES[image]) if word == "RUN")
    assert re.findall(r"install [^&]*\[(\w+)\]", runs) == EXTRAS[image]
    assert set(EXTRAS[image]) <= set(PROJECT["project"]["optional-dependencies"])


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_without_root(image: str) -> None:
    """A number, so that Kubernetes can see it; what it writes is in a volume; SIGTERM ends it."""
    found = dict(instructions(IMAGES[image]))
    assert re.fullmatch(r"[1-9]\d*:\d+", found["USER"])
    assert found["VOLUME"] == found["WORKDIR"] == "/var/lib/kvshare"
    assert found["STOPSIGNAL"] == "SIGTERM"
    assert found["ENTRYPOINT"] == '["kvshare"]'
    assert "kvshare" in PROJECT["project"]["scripts"]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_versions_that_were_tested(image: str) -> None:
    """Of Python, the first that the project allows; of vLLM, one that was run and not only read."""
    bases = [rest.split()[0] for word, rest in instructions(IMAGES[image]) if word == "FROM"]
    for name, tag in (base.split(":") for base in bases):
        if name == "python":
            assert f">={tag.split('-')[0]}" == PROJECT["project"]["requires-python"]
        else:
            assert name == "vllm/vllm-openai"
            assert untested(tag) is only_read(tag) is None


def test_an_untested_version_is_found() -> None:
    """The check above rejects a vLLM that was only read, and one that was not."""
    assert only_read("v0.33.0")
    assert untested("v0.34.0")
    assert untested("latest")


def test_compose_builds_images_that_exist_and_pins_the_others() -> None:
    """Each service has a Dockerfile under its name, or a tag with a version."""
    document = compose()
    for name, service in document["services"].items():
        image = service["image"]
        if image in IMAGES:
            assert service["build"] == {"context": "..", "dockerfile": f"deploy/{IMAGES[image]}"}
        else:
            assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", image), image
        assert name == "qdrant" or (service["read_only"] and service["cap_drop"] == ["ALL"])
        named = [each.split(":")[0] for each in service.get("volumes", ()) if not each.startswith("./")]
        assert set(named) <= set(document["volumes"])
        assert {each["source"] for each in service.get("secrets", ())} <= set(document["secrets"])


def test_qdrant_is_of_the_version_of_its_client() -> None:
    """Major and minor version of the image are those in constraints.txt."""
    client = re.search(r"^qdrant-client==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert client is not None
    assert compose()["services"]["qdrant"]["image"].startswith(f"qdrant/qdrant:v{client[1]}.")


@pytest.mark.parametrize("name", list(pods()))
def test_pods_have_no_rights_that_they_do_not_need(name: str) -> None:
    """The user of the image, a read-only root, no capabilities, no token, limited memory."""
    pod = pods()[name]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    user = dict(instructions(IMAGES[container["image"]]))["USER"]
    context = pod["securityContext"]
    assert context["runAsNonRoot"]
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not pod["automountServiceAccountToken"]
    assert not pod["enableServiceLinks"], "Kubernetes would set VLLM_PORT and KVSHARE_PORT to addresses"
    assert "memory" in container["resources"]["limits"]
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert {"/var/lib/kvshare", "/tmp"} <= mounts


@pytest.mark.parametrize(
    "document", documents(), ids=lambda each: f"{each['kind']} {each['metadata']['name']}"
)
def test_selectors_select_something(document: dict[str, Any]) -> None:
    """Of workloads, services, budgets and policies: labels of a pod, and ports that it has."""
    labels = [pod["spec"]["template"]["metadata"]["labels"] for pod in pods().values()]
    spec = document.get("spec", {})
    selector = spec.get("selector") or spec.get("podSelector") or {}
    selector = selector.get("matchLabels", selector)
    assert selector in labels or document["kind"] in ("ConfigMap", "PersistentVolumeClaim")
    if document["kind"] == "Service":
        (container,) = pods()[selector["app"]]["spec"]["template"]["spec"]["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert all(ports[each["name"]] == each["port"] for each in spec["ports"])


def test_vllm_has_room_for_its_kv() -> None:
    """Memory for --kv-bytes and the eighth that is reserved, and a disk for --disk-bytes and a model."""
    (process,) = (each for each in processes() if each.name == "kubernetes kvshare-vllm")
    memory, disk = (parse_bytes(process.value_of(option)) for option in ("--kv-bytes", "--disk-bytes"))
    limit = parse_bytes(f"{process.details['resources']['limits']['memory']}B")
    (claim,) = pods()["kvshare-vllm"]["spec"]["volumeClaimTemplates"]
    assert limit >= memory * 9 / 8 + 12 * 2**30
    assert parse_bytes(f"{claim['spec']['resources']['requests']['storage']}B") >= disk + 32 * 2**30


def test_one_proxy_has_the_store_and_the_replicas() -> None:
    """A second pod would wait for the store for ever, or take the vLLMs from the first."""
    proxy, vllm = (pods()[name]["spec"] for name in ("kvshare", "kvshare-vllm"))
    assert (proxy["replicas"], proxy["strategy"]) == (1, {"type": "Recreate"})
    settings = next(each for each in documents() if each["kind"] == "ConfigMap")["data"]["settings.yaml"]
    assert len(yaml.safe_load(settings)["vllm"]["replicas"]) == vllm["replicas"]


def test_tags_are_of_this_version() -> None:
    """Proxy and connector must have the same one."""
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text(encoding="utf-8"))
    tags = {each["name"]: each["newTag"] for each in kustomization["images"]}
    used = {pod["spec"]["template"]["spec"]["containers"][0]["image"] for pod in pods().values()}
    assert tags == dict.fromkeys(used, __version__)


@pytest.mark.parametrize("name", WEAKEST)
def test_units_are_valid_and_restricted(name: str, tmp_path: Path) -> None:
    """`systemd-analyze` finds no fault in them and little that they may do without needing it."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / name).read_text(encoding="utf-8")
    (tmp_path / name).write_text(re.sub(r"/opt/[\w-]+/bin/kvshare", "/bin/true", text), encoding="utf-8")
    verified = subprocess.run([program, "verify", tmp_path / name], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    rating: list[str | Path] = [
        program,
        "security",
        "--offline=yes",
        f"--threshold={WEAKEST[name]}",
        "--no-pager",
        tmp_path / name,
    ]
    rated = subprocess.run(rating, capture_output=True, text=True)
    assert rated.returncode == 0, rated.stdout
