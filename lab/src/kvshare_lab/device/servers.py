"""
Stock vLLM in a simulated benchmark, with vLLM's own scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from delta_tree import TokenIds
from kvshare_lab.device.engine import Answer, Engine
from kvshare_lab.device.gpu import SimulatedGpu
from kvshare_lab.device.profile import Profile
from kvshare_lab.device.vllm_config import kv_cache_config
from kvshare_lab.device.worker import SimulatedWorker


class Server:
    """Stock vLLM. Requests are sent to it at times of its own clock."""

    def __init__(self, profile: Profile, config: VllmConfig, gpu: SimulatedGpu) -> None:
        self.profile, self._config = profile, config
        self.gpu, self.clock = gpu, gpu.clock
        self.kv_cache = kv_cache_config(profile.model)
        with set_current_vllm_config(config):
            self.scheduler = AsyncScheduler(
                config,
                self.kv_cache,
                StructuredOutputManager(config),
                block_size=profile.model.block_size,
                log_stats=False,
            )
        self.engine = Engine(
            self.gpu, self.scheduler, self._worker(), bytes_per_token=profile.model.bytes_per_token
        )
        self._hasher = get_request_block_hasher(profile.model.block_size, get_hash_fn_by_name("sha256"))
        self._numbers = count()

    def send(self, prompt: TokenIds, *, max_tokens: int, at: float, donor: TokenIds | None = None) -> Answer:
        """A client sends a prompt, which is answered in virtual time once the engine runs."""
        return self.send_straight(prompt, max_tokens=max_tokens, at=at)

    def send_straight(self, prompt: TokenIds, *, max_tokens: int, at: float) -> Answer:
        """The same to vLLM itself, where a proxy stands in front of it."""
        answer = Answer(self._new_id(), at)
        make = partial(self._request, answer.request_id, prompt, max_tokens)
        self.engine.send(make, answer, arrives_at=at + self.profile.costs.fronts_s(len(prompt)))
        return answer

    @contextmanager
    def calling(self, on_answer: Callable[[Answer], None]) -> Iterator[None]:
        """Call this with each answer that is complete."""
        before, self.engine.on_answer = self.engine.on_answer, on_answer
        try:
            yield
        finally:
            self.engine.on_answer = before

    def run(self) -> None:
        """Until all that was sent is answered."""
        self.engine.run()

    def close(self) -> None:
        self.scheduler.shutdown()

    @property
    def host_s(self) -> dict[str, float]:
        """Seconds of this machine's CPU, measured: they are part of no simulated time."""
        return {"scheduling": self.engine.scheduling_s}

    def _worker(self) -> SimulatedWorker | None:
        return None

    def _new_id(self) -> str:
        return f"request-{next(self._numbers)}"

    def _request(
        self,
        request_id: str,
        prompt: TokenIds,
        max_tokens: int,
        *,
        salt: str | None = None,
        transfer: dict[str, Any] | None = None,
    ) -> Request:
        extra = None if transfer is None else {"kv_transfer_params": transfer}
        return Request(
            request_id,
            prompt.tolist(),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra),
            None,
            arrival_time=time.time(),
            cache_salt=salt,
            block_hasher=self._hasher,
        )
