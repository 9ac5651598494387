"""Which replica turns bodies into tokens, and what is done where it cannot."""

from __future__ import annotations

import pytest

from kvshare.errors import NoReplicaError, UpstreamError
from kvshare.fleet.client import RenderedPrompt, ServedModels
from kvshare.fleet.rendering import Renderer
from kvshare.fleet.replica import Fleet, Replica
from kvshare.fleet.token_lists import TokenList

BODY = b'{"prompt": "a"}'


class Vllm:
    """One that renders, or answers with a status."""

    def __init__(self, number: int, status: int | None = None) -> None:
        self.number, self.status, self.num_asked = number, status, 0
        self.fails = False

    async def render(self, path: str, body: bytes) -> list[RenderedPrompt]:
        self.num_asked += 1
        if self.status is not None or self.fails:
            raise UpstreamError("no", status=self.status)
        return [RenderedPrompt(TokenList.read(b"[%d]" % self.number), "url")]

    async def tokenize(self, body: object) -> TokenList:
        self.num_asked += 1
        return TokenList.read(b"[%d]" % self.number)


def fleet_of(*vllms: Vllm) -> Fleet:
    replicas = [Replica(f"r{vllm.number}", vllm=vllm, control=None) for vllm in vllms]  # type: ignore[arg-type]
    for replica in replicas:
        replica.models = ServedModels(("m",))
    return Fleet(replicas)


async def rendered(renderer: Renderer) -> list[int] | None:
    prompts = await renderer.render("/v1/messages", BODY)
    return None if prompts is None else [prompt.tokens.token_ids.tolist()[0] for prompt in prompts]


async def test_the_idlest_replica_renders() -> None:
    """As it does everything else."""
    fleet = fleet_of(Vllm(1), Vllm(2))
    assert await rendered(Renderer(fleet)) == [1]
    fleet.replicas[0].num_inflight = 3
    assert await rendered(Renderer(fleet)) == [2]
    assert (await Renderer(fleet).tokenize({})).token_ids.tolist() == [2]


@pytest.mark.parametrize("status", [403, 404, 405])
async def test_one_without_the_route_is_asked_once(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """Others render for it; the log says once what to do."""
    without, other = Vllm(1, status), Vllm(2)
    renderer = Renderer(fleet_of(without, other))
    assert [await rendered(renderer) for _ in range(3)] == [[2]] * 3
    assert (without.num_asked, other.num_asked) == (1, 3)
    (line,) = caplog.messages
    assert "replica r1 has no /render routes" in line
    assert "--enable-scale-out" in line


async def test_where_none_has_the_route_there_are_no_tokens() -> None:
    """That is not an error, and is not tried for each request; a replica that comes back is."""
    vllms = Vllm(1, 404), Vllm(2, 403)
    fleet = fleet_of(*vllms)
    renderer = Renderer(fleet)
    assert [await rendered(renderer) for _ in range(3)] == [None] * 3
    assert [vllm.num_asked for vllm in vllms] == [1, 1]
    vllms[0].status, fleet.replicas[0].renders = None, True
    assert await rendered(renderer) == [1]


@pytest.mark.parametrize("status", [None, 400, 500])
async def test_another_failure_is_the_requests_own(status: int | None) -> None:
    """The next request may render: the route is there."""
    failing = Vllm(1, status)
    failing.fails = True
    fleet = fleet_of(failing, Vllm(2))
    with pytest.raises(UpstreamError):
        await rendered(Renderer(fleet))
    assert fleet.replicas[0].renders
    failing.status, failing.fails = None, False
    assert await rendered(Renderer(fleet)) == [1]


async def test_two_requests_that_find_no_route_at_once_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Both had begun before either had its answer."""
    (replica,) = (fleet := fleet_of(Vllm(1, 404))).replicas

    class Late(Vllm):
        async def render(self, path: str, body: bytes) -> list[RenderedPrompt]:
            if self.num_asked == 0:
                self.num_asked = 1
                await Renderer(fleet).render(path, body)  # the other one, meanwhile
            return await super().render(path, body)

    replica.vllm = Late(1, 404)  # type: ignore[assignment]
    assert await rendered(Renderer(fleet)) is None
    assert len(caplog.messages) == 1


async def test_where_nobody_serves_nothing_is_rendered() -> None:
    """It is the error of a request that finds no replica."""
    fleet = fleet_of(Vllm(1))
    fleet.replicas[0].models = None
    with pytest.raises(NoReplicaError):
        await rendered(Renderer(fleet))
    with pytest.raises(NoReplicaError):
        await Renderer(fleet).tokenize({})
