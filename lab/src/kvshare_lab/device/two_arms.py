"""
Requests with and without sharing on a simulated device, on default settings, for `kvshare bench inway`.

    alone       one prompt after the other, of each length and kind, from a server's first client on
    load        prompts of one length and kind, at 80 % of what vLLM completes without sharing
    mix         prompts of all lengths, of which a share are near-duplicates, at the same load

on a device as it was measured, and on machines that are derived from it. The server is the product as it is
started: it has measured its costs, and its controller serves some blocks of time without sharing. Each
request is sent to both arms, with the same prompts before it and at the same time: sharing on, and vLLM as it
answers with mode off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from delta_tree import TokenIds
from kvshare.settings import load_settings
from kvshare_lab.device.arms import servers
from kvshare_lab.device.engine import Answer
from kvshare_lab.device.machines import machine
from kvshare_lab.device.profile import Profile
from kvshare_lab.device.servers import Server
from kvshare_lab.device.sharing_server import SharingServer
from kvshare_lab.device.start import measure_at_start
from kvshare_lab.device.traffic import alone, in_turns, taken_s
from kvshare_lab.vllm.bounds import KINDS, Cell, Cells, prompt_of_kind
from kvshare_lab.vllm.prompts import unrelated_prompt
from kvshare_lab.vllm.sequences import poisson_arrivals

_OF_CAPACITY = 0.8
_CLIENTS, _DONORS = 16, 2
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class InWay:
    """`repeats`: of each length alone. `requests`: of each length and kind at load, half of a mix."""

    lengths: Sequence[int]
    shares: Sequence[float]
    repeats: int
    requests: int
    output_tokens: int = 8


class Sent(NamedTuple):
    """A request of a load."""

    prompt: TokenIds
    donor: TokenIds | None
    kind: str


def of_kind(rng: np.random.Generator, kind: str, donor: TokenIds) -> Sent:
    """A new prompt of one of KINDS, as long as the donor."""
    return Sent(prompt_of_kind(rng, kind, donor), None if kind == "unshared" else donor, kind)


def in_way(profile: Profile, name: str, options: InWay, *, seed: int) -> Cells:
    """The cells of one of `machines.MACHINES`."""
    derived, cells = machine(profile, name, longest=max(options.lengths)), Cells()
    with servers(derived, load_settings(None)) as (plain, shared):
        measure_at_start(shared, np.random.default_rng([seed, 1]))
        arms = _Arms(plain, shared, options, np.random.default_rng(seed), cells, name)
        arms.alone()
        for length in options.lengths:
            arms.at_load(length)
        for share in options.shares:
            arms.mixed(share)
    return cells


@dataclass(slots=True)
class _Arms:
    plain: Server
    shared: SharingServer
    options: InWay
    rng: np.random.Generator
    cells: Cells
    name: str

    def alone(self) -> None:
        """Every length in each round. A donor is itself a prompt like no other."""
        for _ in range(self.options.repeats):
            for length in self.rng.permutation(self.options.lengths).tolist():
                donor = unrelated_prompt(self.rng, length)
                self._alone(Sent(donor, None, "unshared"))
                for kind in ("shared", "refused"):
                    self._alone(of_kind(self.rng, kind, donor))

    def at_load(self, length: int) -> None:
        """Prompts of one kind after those of another."""
        donors, number = self._donors([length])[length], self.options.requests
        for kind in KINDS:
            sent = [of_kind(self.rng, kind, self._one_of(donors)) for _ in range(number)]
            self._load(sent, of="load", tokens=length)

    def mixed(self, share: float) -> None:
        """Judged by kind, and all together."""
        lengths, number = self.options.lengths, 2 * self.options.requests
        donors = self._donors(lengths)
        is_near = self.rng.permutation(number) < round(share * number)
        sent = [
            of_kind(self.rng, "shared" if near else "unshared", self._one_of(donors[length]))
            for near, length in zip(is_near.tolist(), self.rng.choice(lengths, number).tolist(), strict=True)
        ]
        self._load(sent, of=f"mix {share:.0%}", tokens=None)

    def _alone(self, sent: Sent) -> None:
        answers = [alone(server, sent.prompt, sent.donor).answer for server in (self.plain, self.shared)]
        self._note(sent, answers, of="alone", tokens=len(sent.prompt))

    def _load(self, sent: Sequence[Sent], *, of: str, tokens: int | None) -> None:
        arrivals = poisson_arrivals(self.rng, len(sent), per_s=_OF_CAPACITY * self._capacity(sent))
        both = [self._play(server, sent, arrivals) for server in (self.plain, self.shared)]
        for each, answers in zip(sent, zip(*both, strict=True), strict=True):
            self._note(each, answers, of=of, tokens=tokens)

    def _play(self, server: Server, sent: Sequence[Sent], arrivals: Sequence[float]) -> list[Answer]:
        began = server.clock.now() + _PAUSE_S
        answers = [
            server.send(each.prompt, max_tokens=self.options.output_tokens, at=began + at, donor=each.donor)
            for each, at in zip(sent, arrivals, strict=True)
        ]
        server.run()
        if isinstance(server, SharingServer):
            server.read_events()
        return answers

    def _capacity(self, sent: Sequence[Sent]) -> float:
        """Requests a second that vLLM completes of prompts as long as these."""
        prompts = [(unrelated_prompt(self.rng, len(each.prompt)), None) for each in sent]
        done = in_turns(self.plain, prompts, clients=_CLIENTS, output_tokens=self.options.output_tokens)
        return len(done) / taken_s(done)

    def _donors(self, lengths: Sequence[int]) -> dict[int, list[TokenIds]]:
        """Popular prompts, which both arms have answered."""
        donors = {length: [unrelated_prompt(self.rng, length) for _ in range(_DONORS)] for length in lengths}
        for donor in chain(*donors.values()):
            alone(self.plain, donor)
            alone(self.shared, donor)
            if not self.shared.holds(donor):  # it came while nothing was shared
                alone(self.shared, donor)
        return donors

    def _one_of(self, donors: Sequence[TokenIds]) -> TokenIds:
        return donors[int(self.rng.integers(len(donors)))]

    def _note(self, sent: Sent, answers: Sequence[Answer], **names: object) -> None:
        kinds = (sent.kind,) if names["tokens"] is not None else (sent.kind, "all")
        metrics = ("first",) if names["of"] == "alone" else ("first", "whole")
        decision = self.shared.decision(answers[1].request_id)
        for kind, metric in product(kinds, metrics):
            cell: Cell = self.cells.of(machine=self.name, **names, kind=kind, token=metric)
            place = 0 if metric == "first" else -1
            off_s, on_s = (answer.token_at[place] - answer.sent_at for answer in answers)
            cell.off_s.append(off_s)
            cell.on_s.append(on_s)
            cell.decisions[decision] += 1
