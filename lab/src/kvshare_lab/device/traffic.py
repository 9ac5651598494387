"""
What clients send to the two servers: one prompt after the other, many clients at once, and prompts that
arrive while others are answered. What comes back are raw times, and the work of each request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from delta_tree import TokenIds, token_ids
from kvshare_lab.device.engine import Answer
from kvshare_lab.device.servers import Server
from kvshare_lab.device.sharing_server import SharingServer
from kvshare_lab.vllm.prompts import near_duplicate, prefix_hit, unrelated_prompt

_EDITS = 5
_BLOCK = 16
_PASSAGES = 9
_PAUSE_S = 0.5  # between requests that are measured alone; longer than any save


@dataclass(frozen=True, slots=True)
class Arrived:
    """An answered request of a server. `is_near`: it has a donor."""

    answer: Answer
    num_tokens: int
    is_near: bool

    def to_json(self, server: Server) -> dict[str, Any]:
        """`stage_s` as the connector reports it; `work` is what the device and the host were asked."""
        request_id = self.answer.request_id
        document: dict[str, Any] = {
            "tokens": self.num_tokens,
            "is_near": self.is_near,
            "sent_s": self.answer.sent_at,
            "ttft_s": self.answer.ttft_s,
            "gaps_s": self.answer.gaps_s,
            "work": server.gpu.work[request_id].to_json(),
        }
        if isinstance(server, SharingServer) and (report := server.reports.get(request_id)) is not None:
            document |= {
                "computed": report.num_computed,
                "decision": report.decision,
                "reason": report.reason,
                "stage_s": dict(report.stage_seconds),
            }
        return document


def alone(server: Server, prompt: TokenIds, donor: TokenIds | None = None) -> Arrived:
    """A prompt that is sent while nothing else runs, and answered with one token."""
    at = server.clock.now() + _PAUSE_S
    answer = server.send(prompt, max_tokens=1, at=at, donor=donor)
    server.run()
    if isinstance(server, SharingServer):
        server.read_events()
    return Arrived(answer, len(prompt), donor is not None)


def first_tokens(
    plain: Server, shared: SharingServer, rng: np.random.Generator, lengths: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Of each length: in full, 10 % and 1 % changed, and a hit of 90 % in vLLM's own prefix cache."""
    for length in lengths:
        donor = unrelated_prompt(rng, length)
        alone(shared, donor)
        near = {
            name: alone(shared, near_duplicate(rng, donor, changed=changed, edits=_EDITS), donor)
            for name, changed in (("changed_10", 0.1), ("changed_1", 0.01))
        }
        full = alone(plain, donor)
        hit = alone(plain, prefix_hit(rng, donor, num_new=round(0.1 * length), block_size=_BLOCK))
        yield {
            "tokens": length,
            "full": full.to_json(plain),
            "prefix": hit.to_json(plain),
            **{name: arrived.to_json(shared) for name, arrived in near.items()},
        }


def moved_and_edited(
    shared: SharingServer, rng: np.random.Generator, lengths: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Of each length: 10 % changed, and the same passages in another order."""
    for length in lengths:
        donor = unrelated_prompt(rng, length)
        alone(shared, donor)
        first, *middle, last = np.array_split(donor, _PASSAGES)
        moved = [middle[number] for number in rng.permutation(len(middle))]
        prompts = {
            "edited": near_duplicate(rng, donor, changed=0.1, edits=_EDITS),
            "reordered": token_ids(np.concatenate([first, *moved, last])),
        }
        rows = {kind: alone(shared, prompt, donor).to_json(shared) for kind, prompt in prompts.items()}
        yield {"tokens": length, **rows}


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: each client sends its next request when its last one is answered."""

    clients: int = 16
    prompt_tokens: int = 8000
    output_tokens: int = 32
    donors: int = 6
    requests: int = 64
    changed: float = 0.1


def closed_loop(server: Server, rng: np.random.Generator, load: Load, *, near_share: float) -> dict[str, Any]:
    """All requests of an arm. The donors are answered before."""
    donors = [unrelated_prompt(rng, load.prompt_tokens) for _ in range(load.donors if near_share else 0)]
    for donor in donors:
        alone(server, donor)
    prompts = list(_prompts(rng, load, donors, num_near=round(near_share * load.requests)))
    sent = in_turns(server, prompts, clients=load.clients, output_tokens=load.output_tokens)
    seconds = taken_s(sent)
    return {
        "near_share": near_share,
        "seconds": seconds,
        "requests_per_s": len(sent) / seconds,
        "requests": [arrived.to_json(server) for arrived in sent],
    }


def in_turns(
    server: Server,
    prompts: Sequence[tuple[TokenIds, TokenIds | None]],
    *,
    clients: int,
    output_tokens: int,
) -> list[Arrived]:
    """Prompts with their donors, from clients of which each sends the next one when its last is answered."""
    waiting, sent = deque(prompts), list[Arrived]()

    def send_next(_: Answer | None, at: float) -> None:
        if waiting:
            prompt, donor = waiting.popleft()
            answer = server.send(prompt, max_tokens=output_tokens, at=at, donor=donor)
            sent.append(Arrived(answer, len(prompt), donor is not None))

    began = server.clock.now() + _PAUSE_S
    with server.calling(lambda answer: send_next(answer, answer.token_at[-1])):
        for _ in range(clients):
            send_next(None, began)
        server.run()
    if isinstance(server, SharingServer):
        server.read_events()
    return sent


def taken_s(sent: Sequence[Arrived]) -> float:
    """From the first request to the last token."""
    answers = [arrived.answer for arrived in sent]
    return max(answer.token_at[-1] for answer in answers) - min(answer.sent_at for answer in answers)


def _prompts(
    rng: np.random.Generator, load: Load, donors: Sequence[TokenIds], *, num_near: int
) -> Iterator[tuple[TokenIds, TokenIds | None]]:
    """Prompts in random order, near-duplicates with their donors."""
    for number in rng.permutation(load.requests):
        if number < num_near:
            donor = donors[number % len(donors)]
            yield near_duplicate(rng, donor, changed=load.changed, edits=_EDITS), donor
        else:
            yield unrelated_prompt(rng, load.prompt_tokens), None


@dataclass(frozen=True, slots=True)
class Streams:
    """Answers that are decoded while other requests arrive, one when the last one is answered."""

    streams: int = 8
    stream_prompt: int = 32
    output_tokens: int = 128
    prompt_tokens: int = 16384
    rounds: int = 3
    changed: float = 0.1
    computed_tokens: int = 0  # of a prefix hit


ARRIVALS = ("quiet", "full", "saves", "loads", "prefix_hits")


def between_tokens(
    shared: SharingServer, rng: np.random.Generator, streams: Streams, arm: str
) -> dict[str, Any]:
    """
    The gaps between the tokens of the streams. What arrives:

        quiet           nothing
        full            unrelated prompts without the proxy, neither shared nor saved
        saves           unrelated prompts: their KV is saved
        loads           near-duplicates of a stored prompt
        prefix_hits     without the proxy, prompts of which vLLM's prefix cache has all but `computed_tokens`
    """
    donor = unrelated_prompt(rng, streams.prompt_tokens)
    if arm == "prefix_hits":
        shared.send_straight(donor, max_tokens=1, at=shared.clock.now())
        shared.run()
    else:
        alone(shared, donor)
    rounds = [_Round(shared, rng, streams, donor, arm) for _ in range(streams.rounds)]
    gaps = [gap for each in rounds for answer in each.decode() for gap in answer.gaps_s]
    arrived = [each for one in rounds for each in one.arrived]
    return {
        "arm": arm,
        "arrivals": len(arrived),
        "gaps_s": gaps,
        "requests": [each.to_json(shared) for each in arrived],
    }


class _Round:
    """While the streams decode, one prompt arrives after the other."""

    def __init__(
        self, shared: SharingServer, rng: np.random.Generator, streams: Streams, donor: TokenIds, arm: str
    ) -> None:
        self._shared, self._rng, self._streams = shared, rng, streams
        self._donor, self._arm = donor, arm
        self._decoding: set[str] = set()
        self.arrived: list[Arrived] = []

    def decode(self) -> list[Answer]:
        began, options = self._shared.clock.now() + _PAUSE_S, self._streams
        prompts = [unrelated_prompt(self._rng, options.stream_prompt) for _ in range(options.streams)]
        answers = [
            self._shared.send_straight(prompt, max_tokens=options.output_tokens, at=began)
            for prompt in prompts
        ]
        self._decoding = {answer.request_id for answer in answers}
        with self._shared.calling(self._note):
            if self._arm != "quiet":
                self._arrive(began)
            self._shared.run()
        return answers

    def _note(self, answer: Answer) -> None:
        if answer.request_id in self._decoding:
            self._decoding.remove(answer.request_id)
        elif self._decoding:
            self._arrive(answer.token_at[-1])

    def _arrive(self, at: float) -> None:
        shared, options = self._shared, self._streams
        donor = self._donor if self._arm == "loads" else None
        if donor is not None:
            prompt = near_duplicate(self._rng, donor, changed=options.changed, edits=_EDITS)
        else:
            prompt = unrelated_prompt(self._rng, options.prompt_tokens)
        if self._arm == "prefix_hits":
            num_known = len(prompt) - options.computed_tokens
            prompt = np.concatenate([self._donor[:num_known], prompt[num_known:]])
        if self._arm in ("full", "prefix_hits"):
            answer = shared.send_straight(prompt, max_tokens=1, at=at)
        else:
            answer = shared.send(prompt, max_tokens=1, at=at, donor=donor)
        self.arrived.append(Arrived(answer, len(prompt), donor is not None))
