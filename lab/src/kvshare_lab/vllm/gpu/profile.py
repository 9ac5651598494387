"""
Where the threads of vLLM's engine process spend their time while near-duplicates and unrelated prompts
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
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvshare_lab.vllm.gpu.config import Config
from kvshare_lab.vllm.gpu.report import Figures, NotMeasurableError, Progress
from kvshare_lab.vllm.session import Session, session
from kvshare_lab.vllm.stack import Stack

_ENGINE = b"EngineCore"  # in the title of the process in which vLLM's scheduler and its worker run
_RATE, _SECONDS = 200, 15  # samples a second
_SPARE_S = 5.0
_NUM_TOP = 12  # functions of a thread
_CLIENTS = 4
_LINE = re.compile(r":\d+\)$")


async def profile(servers: Stack, config: Config, progress: Progress) -> Figures:
    """The top functions of each thread that was ever busy. Raises NotMeasurableError without py-spy."""
    program = sampler()
    if program is None:
        raise NotMeasurableError("py-spy is not installed")
    seconds = max(1, min(_SECONDS, int(progress.left_s - _SPARE_S)))
    own = replace(config.part("profile"), prompt_tokens=config.load_tokens)
    async with session(servers, own) as bench:
        with tempfile.TemporaryDirectory(prefix="kvshare-bench-") as folder:
            samples = await _sampled(
                bench, program, engine_pid(servers.shared.session_id), seconds, Path(folder)
            )
    return {
        "seconds": seconds,
        "samples_per_s": _RATE,
        "prompt_tokens": own.prompt_tokens,
        "threads": by_thread(samples, num_samples=_RATE * seconds),
    }


def sampler() -> str | None:
    """py-spy on the path of programs, beside this interpreter, or in a folder of packages."""
    folders = [os.environ.get("PATH", ""), str(Path(sys.executable).parent), *sys.path]
    return shutil.which("py-spy", path=os.pathsep.join(folders))


def engine_pid(session_id: int) -> int:
    """The process of a vLLM in which the scheduler and the worker run. Raises NotMeasurableError."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            if os.getsid(int(path.name)) == session_id and _ENGINE in (path / "cmdline").read_bytes():
                return int(path.name)
    raise NotMeasurableError(f"vLLM has no process whose title contains {_ENGINE.decode()}")


async def _sampled(bench: Session[Config], program: str, pid: int, seconds: int, folder: Path) -> str:
    """What py-spy writes while clients send requests. Raises NotMeasurableError where it is not permitted."""
    donor, file = bench.unrelated(), folder / "profile"
    await bench.proxy.complete(donor)
    await bench.settle()
    options = ["-p", str(pid), "-r", str(_RATE), "-d", str(seconds), "-t", "-f", "raw", "-o", str(file)]
    process = await asyncio.create_subprocess_exec(
        program,
        "record",
        *options,
        "--nonblocking",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    ended = asyncio.create_task(process.communicate())

    async def client(number: int) -> None:
        while not ended.done():
            await bench.proxy.complete(bench.edited(donor) if number % 2 else bench.unrelated())

    try:
        await asyncio.gather(*map(client, range(_CLIENTS)))
        _, said = await ended
    except BaseException:
        with suppress(ProcessLookupError):
            process.kill()
        raise
    if process.returncode or not file.exists():
        last = said.decode(errors="replace").strip().splitlines()[-1:] or ["it wrote nothing"]
        raise NotMeasurableError(f"py-spy ended with {process.returncode}: {last[0]}")
    return file.read_text(errors="replace")


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
