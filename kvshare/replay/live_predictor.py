"""What arms expect of a request, beside a server that is asked the same."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from kvshare.replay.arms import Arm, Meanings, make_arm
from kvshare.replay.options import ReplayOptions, make_bench, make_meanings
from kvshare.replay.requests import TokenizedRequest


class Predictor:
    """Arms in a thread of their own: they have event loops, and planning must not hold up the sending."""

    def __init__(self, options: ReplayOptions) -> None:
        self._options = options
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvshare-predict")
        self.meanings: Meanings | None = None
        self._arms: list[Arm] = []

    def __enter__(self) -> Predictor:
        self._thread.submit(self._open).result()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._close).result()
        self._thread.shutdown()

    async def predict(self, request: TokenizedRequest) -> dict[str, int]:
        """Tokens not computed, by arm."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._predict, request)

    def _open(self) -> None:
        options = self._options
        self.meanings = make_meanings(options, None)
        bench = make_bench(options, self.meanings, explain_losses=False)
        capacity = next(iter(options.capacities_tokens), None)
        self._arms = [make_arm(spec, bench, capacity) for spec in options.arms]

    def _close(self) -> None:
        for arm in self._arms:
            arm.close()

    def _predict(self, request: TokenizedRequest) -> dict[str, int]:
        if self.meanings is not None:
            self.meanings.prepare([request])
        return {arm.name: arm.observe(request).num_hit for arm in self._arms}
