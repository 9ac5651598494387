"""
The processes of a benchmark: stock vLLM, vLLM with the connector, the proxy. Starts, waits for, stops them.

Each is a process group with a log file; where one does not start, the error has the end of its log. A
benchmark that is killed leaves none of them. All vLLMs get the same cores, so that none is measured with more
than another.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvshare.errors import EngineError
from kvshare.vllm_protocol.messages import TOKEN_VARIABLE
from kvshare.vllm_protocol.versions import program
from kvshare_lab.vllm import absent_torchvision
from kvshare_lab.vllm.cpu_time import session_cpu_seconds
from kvshare_lab.vllm.ports import free_ports
from kvshare_lab.vllm.soak_command import soak_command
from kvshare_lab.vllm.watchdog import STOP_S, watched

MODEL_NAME = "bench"
FAULTS_VARIABLE = "BENCH_FAULTS"  # a file: loads fail while it exists
DISK_VARIABLE = "BENCH_DISK_S"  # seconds that each write of a slow disk takes more
_KVSHARE = (sys.executable, "-m", "kvshare.cli.main")
_ON_SLOW_DISK = (sys.executable, "-m", "kvshare_lab.vllm.slow_disk")
_HOST = "127.0.0.1"
START_S = 900.0  # two compile at a time, on one core
_LOG_LINES = 30


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of both vLLM servers."""

    dtype: str = "bfloat16"
    max_model_len: int = 8192
    max_num_batched_tokens: int | None = None  # None: vLLM's choice
    kv_cache_gib: int = 1
    kv_cache_dtype: str | None = None  # None: that of the weights
    num_blocks: int | None = None  # of the KV cache; None: as many as fit
    block_size: int | None = None  # None: vLLM's choice
    num_threads: int | None = None  # None: all cores but one, as vLLM itself decides
    enforce_eager: bool = False  # True: the model is not compiled, which takes a minute or two at every start
    attention_backend: str | None = None  # None: vLLM's choice
    device_memory: float | None = None  # share of a GPU's memory; None: vLLM's default
    device_kv_bytes: int | None = None  # of the KV cache on a GPU; None: what is left of `device_memory`
    speculation: Mapping[str, Any] | None = None  # vLLM's speculative_config
    checks_syncs: bool = False  # warn of each wait of the host for the GPU
    is_resettable: bool = False  # with the route that empties the prefix cache
    one_group: bool = False  # of KV for all layers, those with a window, too
    max_images: int | None = None  # of a prompt; 0: no towers are loaded; None: the model takes no media

    @property
    def arguments(self) -> list[str]:
        given = {
            "--host": _HOST,
            "--served-model-name": MODEL_NAME,
            "--dtype": self.dtype,
            "--max-model-len": self.max_model_len,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--num-gpu-blocks-override": self.num_blocks,
            "--block-size": self.block_size,
            "--kv-cache-dtype": self.kv_cache_dtype,
            "--attention-backend": self.attention_backend,
            "--gpu-memory-utilization": self.device_memory,
            "--kv-cache-memory-bytes": self.device_kv_bytes,
            "--limit-mm-per-prompt": json.dumps({"image": self.max_images}) if self.max_images else None,
            "--speculative-config": None if self.speculation is None else json.dumps(self.speculation),
        }
        named = [text for name, value in given.items() if value is not None for text in (name, str(value))]
        flags = ["--enforce-eager"] * self.enforce_eager + ["--language-model-only"] * (self.max_images == 0)
        flags += ["--disable-hybrid-kv-cache-manager"] * self.one_group
        return [*named, *flags, "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]

    @property
    def environment(self) -> dict[str, str]:
        checks = {"VLLM_GPU_SYNC_CHECK": "warn"} if self.checks_syncs else {}
        return {
            **checks,
            **({"VLLM_SERVER_DEV_MODE": "1"} if self.is_resettable else {}),
            **({"PYTHONPATH": str(absent_torchvision.FOLDER)} if self.max_images is not None else {}),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # by default 5 s: a connection may close under a request
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self.cores)),
        }

    @property
    def cores(self) -> list[int]:
        """The last ones of the cores that this process may use."""
        allowed = sorted(os.sched_getaffinity(0))
        return allowed[-(self.num_threads or max(1, len(allowed) - 1)) :]


@dataclass(slots=True)
class Server:
    """One process of a benchmark. `stop` ends its whole group, and may be called twice."""

    name: str
    command: Sequence[str]
    url: str
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    control_url: str | None = None  # of the connector, where there is one
    _process: subprocess.Popen[bytes] | None = None
    _watchdog: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_path.open("wb") as log_file:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._watchdog = watched(self._process.pid)

    def wait_ready(self, within_s: float) -> None:
        """Raises EngineError, with the end of the log, if the process ends or takes too long."""
        deadline = time.monotonic() + within_s
        while not self._answers():
            has_ended = self._process is None or self._process.poll() is not None
            if has_ended or time.monotonic() > deadline:
                tail = "\n".join(self.log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:])
                what = "ended while starting" if has_ended else f"was not ready after {within_s:.0f} s"
                raise EngineError(f"{self.name} {what}:\n{tail}")
            time.sleep(0.2)

    def terminate(self) -> None:
        """Ask it to end; `stop` waits for that."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)

    def stop(self) -> None:
        self.terminate()
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # children that still run, too
        if self._watchdog is not None:  # first: its group's id is free when the process has been waited for
            self._watchdog.kill()
            self._watchdog.communicate()
            self._watchdog = None
        process.wait()

    @property
    def session_id(self) -> int:
        """Of all its processes, while it runs."""
        assert self._process is not None
        return self._process.pid

    def cpu_seconds(self) -> float:
        """User and system time of all its processes so far, including children that have ended."""
        return session_cpu_seconds(self.session_id)

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(self.url + self.ready_path, timeout=5) as response:
            return bool(response.status == 200)
        return False


@contextmanager
def running(
    servers: Sequence[Server], *, one_by_one: bool = False, start_s: float = START_S
) -> Iterator[None]:
    """
    Start all, wait until all are ready, and stop all when the block ends.

    `one_by_one`: start each once those before it are ready. Raises EngineError for a server that does not
    start, or if they are not ready after `start_s`.
    """
    deadline = time.monotonic() + start_s
    try:
        for group in [[server] for server in servers] if one_by_one else [servers]:
            for server in group:
                server.start()
            for server in group:
                server.wait_ready(max(0.0, deadline - time.monotonic()))
        yield
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.stop()


def plain_vllm(model: Path | str, folder: Path, options: VllmOptions) -> Server:
    """Stock vLLM with its prefix cache."""
    port = free_ports(1)[0]
    return Server(
        name="plain vLLM",
        command=[*program(), "serve", str(model), "--port", str(port), *options.arguments],
        url=f"http://{_HOST}:{port}",
        log_path=folder / "plain.log",
        environment=options.environment,
    )


def shared_vllm(
    model: Path | str,
    folder: Path,
    options: VllmOptions,
    *,
    kv_bytes: int,
    token: str,
    disk: Path | None = None,
    can_fail: bool = False,
    keeps_blocks: bool = False,
) -> Server:
    """
    vLLM with KVShare's connector, as `kvshare vllm` starts it. `disk`: a folder for its KV. `can_fail`: see
    `failing_loads`; next to it a connector that keeps blocks, if `keeps_blocks`.
    """
    port, control_port = free_ports(2)
    own = ["--port", str(port), "--control-port", str(control_port), "--kv-bytes", str(kv_bytes)]
    own += [] if disk is None else ["--disk", str(disk)]
    command = [*_KVSHARE, "vllm", str(model), *own, *options.arguments]
    environment = {**options.environment, TOKEN_VARIABLE: token}
    if can_fail:
        command = soak_command(command, keeps_blocks=keeps_blocks)
        environment[FAULTS_VARIABLE] = str(folder / "faults")
    return Server(
        name="vLLM with KVShare",
        command=command,
        url=f"http://{_HOST}:{port}",
        log_path=folder / "shared.log",
        environment=environment,
        control_url=f"http://{_HOST}:{control_port}",
    )


@contextmanager
def failing_loads(shared: Server) -> Iterator[None]:
    """The first and every fifth load fails meanwhile, in a vLLM that was started with `can_fail`."""
    switch = Path(shared.environment[FAULTS_VARIABLE])
    switch.touch()
    try:
        yield
    finally:
        switch.unlink()


def proxy(
    upstream: Server,
    folder: Path,
    *,
    token: str,
    settings: Mapping[str, Mapping[str, Any]],
    data_parallel_size: int = 1,
    disk_s: float = 0.0,
) -> Server:
    """
    `kvshare serve --engine vllm` in front of the vLLM with the connector, with an empty store.

    `disk_s`: seconds that each write of its metadata takes more.
    """
    assert upstream.control_url is not None
    config = folder / "config.yaml"
    unwatched = {"control": {"unshared_share": 0.0}}  # a benchmark compares by itself
    # Benchmarks read the connector's reports, and would take those of a measurement for their own.
    cost = {"measure_at_start": False, **settings.get("cost", {})}
    config.write_text(json.dumps({**unwatched, **settings, "cost": cost}))  # JSON is YAML
    port = free_ports(1)[0]
    own = ["--engine", "vllm", "--port", str(port), "--config", str(config), "--store", str(folder / "store")]
    ends = ["--vllm-url", upstream.url, "--vllm-control-url", upstream.control_url]
    ends += ["--vllm-data-parallel-size", str(data_parallel_size)]
    return Server(
        name="the proxy",
        command=[*(_ON_SLOW_DISK if disk_s else _KVSHARE), "serve", *own, *ends],
        url=f"http://{_HOST}:{port}",
        log_path=folder / "proxy.log",
        environment={"HF_HUB_OFFLINE": "1", TOKEN_VARIABLE: token, DISK_VARIABLE: str(disk_s)},
        ready_path="/ready",
    )


def new_token() -> str:
    """A secret for the connector's control server."""
    return secrets.token_hex(16)
