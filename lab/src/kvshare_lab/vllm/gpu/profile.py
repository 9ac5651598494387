"""
Where the threads of vLLM's engine processes spend their time while near-duplicates and unrelated prompts
arrive: a sampling profile by py-spy, where that is installed.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvshare_lab.vllm.gpu.config import Config
from kvshare_lab.vllm.gpu.report import Figures, NotMeasurableError, Progress
from kvshare_lab.vllm.session import Session, session
from kvshare_lab.vllm.stack import Stack

_TITLES = ("VLLM::EngineCore", "VLLM::Worker")  # of the scheduler's process, and of workers outside of it
_RATE, _SECONDS = 200, 15  # samples a second
_SPARE_S = 5.0
_NUM_TOP = 12  # functions of a thread
_CLIENTS = 4
_LINE = re.compile(r":\d+\)$")


async def profile(servers: Stack, config: Config, progress: Progress) -> Figures:
    """By process the top functions of each busy thread. Raises NotMeasurableError without py-spy."""
    program = sampler()
    if program is None:
        raise NotMeasurableError("py-spy is not installed")
    seconds = max(1, min(_SECONDS, int(progress.left_s - _SPARE_S)))
    processes = engine_processes(servers.shared.session_id)
    own = replace(config.part("profile"), prompt_tokens=config.load_tokens)
    with tempfile.TemporaryDirectory(prefix="kvshare-bench-") as name:
        files = {pid: Path(name) / str(pid) for pid in processes}
        commands = [_command(program, pid, seconds, file) for pid, file in files.items()]
        async with session(servers, own) as bench:
            await _sample(bench, commands)
        found = {
            processes[pid]: by_thread(file.read_text(errors="replace"), num_samples=_RATE * seconds)
            for pid, file in files.items()
        }
    return {
        "seconds": seconds,
        "samples_per_s": _RATE,
        "prompt_tokens": own.prompt_tokens,
        "processes": found,
    }


def sampler() -> str | None:
    """py-spy on the path of programs, beside this interpreter, or in a folder of packages."""
    folders = [os.environ.get("PATH", ""), str(Path(sys.executable).parent), *sys.path]
    return shutil.which("py-spy", path=os.pathsep.join(folders))


def engine_processes(session_id: int) -> dict[int, str]:
    """Those of a vLLM that compute, with their titles. Raises NotMeasurableError if there are none."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            if os.getsid(pid := int(path.name)) == session_id:
                title = (path / "cmdline").read_text(errors="replace").strip("\0 ")
                if title.startswith(_TITLES):
                    found[pid] = title
    if not found:
        raise NotMeasurableError(f"vLLM has no process with a title of {', '.join(_TITLES)}")
    return found


def _command(program: str, pid: int, seconds: int, file: Path) -> list[str]:
    options = ["-p", str(pid), "-r", str(_RATE), "-d", str(seconds), "-t", "-f", "raw", "-o", str(file)]
    return [program, "record", *options, "--nonblocking"]


async def _sample(bench: Session[Config], commands: Sequence[Sequence[str]]) -> None:
    """Run them while clients send requests. Raises NotMeasurableError where sampling is not permitted."""
    donor = bench.unrelated()
    await bench.proxy.complete(donor)
    await bench.settle()
    sampling = asyncio.gather(*map(_to_its_end, commands))

    async def client(number: int) -> None:
        while not sampling.done():
            await bench.proxy.complete(bench.edited(donor) if number % 2 else bench.unrelated())

    try:
        await asyncio.gather(*map(client, range(_CLIENTS)))
        await sampling
    finally:
        sampling.cancel()


async def _to_its_end(command: Sequence[str]) -> None:
    """Raises NotMeasurableError if it fails. If this is cancelled, the process is killed."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, said = await process.communicate()
    except BaseException:
        with suppress(ProcessLookupError):
            process.kill()
        raise
    if process.returncode:
        last = said.decode(errors="replace").strip().splitlines()[-1:] or ["without a word"]
        raise NotMeasurableError(f"py-spy ended with {process.returncode}: {last[0]}")


def by_thread(samples: str, *, num_samples: int) -> Figures:
    """
    By thread, the busiest first: the share of the samples in which it was busy, and its top functions.

    `samples`: py-spy's raw format, a stack and its count on each line, the thread in front. `own`: share of
    the thread's samples in the function itself; `total`: also in what it has called.
    """
    threads: defaultdict[str, list[tuple[list[str], int]]] = defaultdict(list)
    for line in samples.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        if frames and count.isdigit():
            threads[thread].append(([_LINE.sub(")", frame) for frame in frames], int(count)))
    found = {name: _thread(stacks, num_samples) for name, stacks in threads.items()}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]["busy"]))


def _thread(stacks: list[tuple[list[str], int]], num_samples: int) -> Figures:
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for frames, count in stacks:
        own[frames[-1]] += count
        total.update(dict.fromkeys(frames, count))
    busy = own.total()
    top = [
        {"function": function, "own": count / busy, "total": total[function] / busy}
        for function, count in own.most_common(_NUM_TOP)
    ]
    return {"busy": busy / num_samples, "top": top}
