"""All replicas behind one proxy: which of them serve, which share, and what model they have in common."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvshare.fleet.follower import Audience, Follower, WatchTimes
from kvshare.fleet.replica import Replica
from kvshare.fleet.upstream import ServedModels

log = logging.getLogger(__name__)


class Fleet:
    """Replicas that come and go. `watch` follows them until `stop`."""

    def __init__(self, replicas: Sequence[Replica], times: WatchTimes) -> None:
        self.replicas = tuple(replicas)
        self._times = times
        self._followers: list[Follower] = []
        self._models: ServedModels | None = None
        self._next = 0  # the replica that comes first among equally idle ones

    @property
    def models(self) -> ServedModels | None:
        """What the replicas serve; None until one has answered."""
        return self._models

    @property
    def max_model_len(self) -> int:
        """In tokens; 0 while it is not known."""
        return self._models.max_model_len if self._models is not None else 0

    def serving(self) -> list[Replica]:
        """
        The replicas that take requests, the idlest first; among equally idle ones the next in rotation.

        Asking does not advance the rotation, see `advance_rotation`.
        """
        rotated = self.replicas[self._next :] + self.replicas[: self._next]
        return sorted((entry for entry in rotated if entry.serves), key=lambda entry: entry.num_inflight)

    def advance_rotation(self) -> None:
        """Called once per request that is sent: equally idle replicas then take turns."""
        self._next = (self._next + 1) % len(self.replicas)

    def sharing(self) -> list[Replica]:
        """Those that plans may be made for."""
        return [replica for replica in self.serving() if replica.shares]

    async def watch(self, audience: Audience) -> None:
        for replica in self.replicas:
            await replica.upstream.open()
            follower = Follower(replica, audience, self._times, on_models=self._check_models)
            self._followers.append(follower)
            follower.start()

    async def stop(self) -> None:
        for follower in self._followers:
            await follower.stop()
        for replica in self.replicas:
            await replica.upstream.close()

    async def all_answered(self, *, timeout_s: float) -> bool:
        """Wait until every replica was asked once; whether they were, in time."""
        answers = (follower.has_answered() for follower in self._followers)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*answers)
        except TimeoutError:
            return False
        return True

    async def all_heard(self, *, timeout_s: float) -> None:
        """Wait until every connector is heard, at most `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < deadline:
            if all(replica.is_heard for replica in self.replicas):
                return
            await asyncio.sleep(min(0.25, timeout_s / 4))

    def _check_models(self, replica: Replica) -> None:
        """A replica with another model than the others have gets no requests."""
        assert replica.models is not None, "told when they are known"
        replica.refusal = None
        others = [other for other in self.replicas if other is not replica and other.serves]
        if not others or self._models is None:
            self._models = replica.models
        elif set(replica.models.names) != set(self._models.names):
            replica.refusal = f"serves {_listed(replica.models)}, the others serve {_listed(self._models)}"
            log.error("replica %s gets no requests: it %s", replica.name, replica.refusal)


def _listed(models: ServedModels) -> str:
    return ", ".join(models.names) or "nothing"
