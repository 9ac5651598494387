"""One request: its salt, what vLLM gets beside its body, and what is known of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvshare.fleet.client import RenderedPrompt
from kvshare.fleet.routed_request import Incoming, Routed, RoutedRequest
from kvshare.fleet.tickets import ticket_for
from kvshare.fleet.token_lists import TokenList
from kvshare.namespace import Owner
from kvshare.reasons import Reason
from kvshare.requests import Decision, Prompt
from kvshare.sharing.arrivals import Arrivals
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.vllm_protocol.messages import TICKET_KEY, Ticket
from kvshare.vllm_protocol.salts import owner_salt, private_salt
from tests.kvshare.fleet.plans import OWNER, PLAN, PROMPT, plan_of
from vector_index import PromptText

EXACT = plan_of((0, 20, 0), exact_length=20)


def request(plan: Plan | NoPlan, *, store: bool = True, has_ticket: bool = True) -> RoutedRequest:
    ticket = ticket_for(plan, PROMPT, ticket_id="r", namespace="n", store=store) if has_ticket else None
    rendered = RenderedPrompt(TokenList.read(b"[1, 2]"), "http://a")
    incoming = Incoming(OWNER, Prompt(PROMPT, PromptText("", "")), rendered=rendered)
    return RoutedRequest(incoming, Routed(plan, ticket))


def test_approximate_tickets_have_a_salt_of_their_own() -> None:
    """Everything else has its owner's; a client's salt divides it, and none meets another's."""
    approximate = ticket_for(PLAN, PROMPT, ticket_id="r", namespace="n", store=True)
    exact = ticket_for(plan_of((0, 20, 0), exact_length=20), PROMPT, ticket_id="r", namespace="n", store=True)
    divided, whole = Incoming(OWNER.divided("mine")), Incoming(OWNER)
    assert RoutedRequest(divided, Routed(ticket=approximate)).salt == private_salt("r")
    assert RoutedRequest(whole, Routed(ticket=exact)).salt == RoutedRequest(whole).salt == owner_salt(OWNER)
    salts = [
        owner_salt(OWNER),
        owner_salt(OWNER.divided("a")),
        owner_salt(OWNER.divided(owner_salt(OWNER))),
        owner_salt(OWNER.divided("a").divided("b")),
        owner_salt(OWNER.divided("b").divided("a")),
        owner_salt(replace(OWNER, salt="a")),
        owner_salt(Owner("globex", "tenant")),
        owner_salt(Owner("acme", "private")),
        owner_salt(Owner("acmetenant", "")),
        owner_salt(OWNER.divided("\ud800")),
    ]
    assert len(set(salts)) == len(salts)
    assert all(len(salt) == 64 for salt in salts)


def test_a_request_begins_unplanned() -> None:
    """Only relayed: nothing but its owner's salt."""
    new = RoutedRequest(Incoming(OWNER))
    assert (new.salt, new.transfer_params, new.report, new.replica) == (owner_salt(OWNER), None, None, "")
    assert new.routed.plan.reason is Reason.OFF
    assert not new.is_only_compared
    assert new.progress.reconciled is not RoutedRequest(Incoming(OWNER)).progress.reconciled


def test_vllm_counts_tokens_as_cached_that_the_connector_computed_only_if_told_how_many() -> None:
    """Of an approximate plan: an exact one, and a request to store, are as vLLM counts them itself."""
    near = request(PLAN)
    assert near.transfer_params == {
        TICKET_KEY: near.routed.ticket.to_json() if near.routed.ticket else None,
        "do_remote_prefill": True,
        "remote_prefill_cached_tokens": 70,
    }
    for other in (request(EXACT), request(NoPlan())):
        assert other.transfer_params is not None
        assert other.transfer_params.keys() == {TICKET_KEY}
        assert Ticket.from_json(other.transfer_params[TICKET_KEY]) == other.routed.ticket
    assert request(NoPlan(), has_ticket=False).transfer_params is None


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (PLAN, (Decision.APPROX, 20, 50, 30)),
        (EXACT, (Decision.EXACT, 20, 0, 80)),
        (NoPlan(Reason.NO_CANDIDATES), (Decision.FULL, 0, 0, 100)),
    ],
)
def test_a_report_says_where_each_token_comes_from(
    plan: Plan | NoPlan, expected: tuple[Decision, int, int, int]
) -> None:
    report = request(plan).report
    assert report is not None
    assert (report.decision, report.num_exact, report.num_copied, report.num_recomputed) == expected
    assert report.num_prompt_tokens == 100


def test_a_ticket_that_neither_copies_nor_stores_only_asks_for_a_report() -> None:
    """Its request is compared with others, and no plan was made for it."""
    assert request(NoPlan(), store=False).is_only_compared
    for other in (request(NoPlan()), request(PLAN, store=False), request(NoPlan(), has_ticket=False)):
        assert not other.is_only_compared


def test_tokens_are_given_back_to_who_rendered_them_and_only_with_a_ticket() -> None:
    """As they were written. Another vLLM may have another template."""
    assert request(PLAN).rendered_for("http://a") == b"[1, 2]"
    assert request(PLAN).rendered_for("http://b") is None
    assert request(NoPlan(), has_ticket=False).rendered_for("http://a") is None
    bare = request(PLAN)
    bare.incoming = replace(bare.incoming, rendered=None)
    assert bare.rendered_for("http://a") is None


def test_a_prompt_that_is_prefilled_is_only_waited_for_until_it_is_stored() -> None:
    """Nothing of it is left to compute; without an arrival there is nobody to know."""
    arrivals = Arrivals(min_run=16)
    arrival = arrivals.begin("n", PROMPT)
    waited_for = request(NoPlan())
    waited_for.routed = replace(waited_for.routed, arrival=arrival)
    assert arrival.remaining() == 100
    waited_for.note_prefilled()
    assert waited_for.progress.is_prefilled
    assert arrival.remaining() == 0
    assert not arrival.over.is_set()
    alone = request(NoPlan())
    alone.note_prefilled()
    assert alone.progress.is_prefilled
