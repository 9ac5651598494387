"""Between plans and tickets: what a plan says to the connector, and what its answer makes of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from delta_tree import Span, TokenIds, token_ids
from kvshare.namespace import Owner
from kvshare.sharing.node_draft import FinishedSequence, StoredSpan
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.vllm_protocol.messages import Finished, Ticket, WireCopy, digest_of
from kvshare.vllm_protocol.salts import owner_salt, private_salt


class BadReportError(ValueError):
    """What a connector says it kept does not fit the ticket it was given."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A prompt as a replica kept it: ready to become a node."""

    sequence: FinishedSequence
    stored: tuple[StoredSpan, ...]


def ticket_for(
    plan: Plan | NoPlan, prompt: TokenIds, *, request_id: str, namespace: str, keep: bool
) -> Ticket:
    """The plan, as the connector needs it. Without a plan the prompt may still become a donor."""
    copies: tuple[WireCopy, ...] = ()
    if isinstance(plan, Plan):
        copies = tuple(
            WireCopy(copy.segment_id, copy.offset, copy.length, copy.target_start, copy.source_position)
            for copy in plan.copies
        )
    return Ticket(
        request_id=request_id,
        namespace=namespace,
        prompt_digest=digest_of(prompt),
        num_tokens=len(prompt),
        exact_length=plan.exact_length if isinstance(plan, Plan) else 0,
        copies=copies,
        keep=keep,
    )


def salt_for(ticket: Ticket | None, owner: Owner, client_salt: str | None) -> str:
    """Approximate KV gets a salt that nobody asks with again; anything else keeps its owner's."""
    if ticket is None or ticket.is_exact:
        return owner_salt(owner, client_salt)
    return private_salt(ticket.request_id)


def kept_of(plan: Plan | NoPlan, prompt: TokenIds, namespace: str, finished: Finished) -> Kept | None:
    """
    What a replica kept of a request: the plan as it was carried out, the tokens, and the new segments.

    Returns: None where nothing was kept
    Raises:  BadReportError if copies and segments do not cover the kept positions exactly once
    """
    if not finished.stored:
        return None
    carried_out = _carried_out(plan, finished.used)
    stored = tuple(
        StoredSpan(entry.segment_id, Span(entry.start, entry.start + entry.length), entry.num_bytes)
        for entry in finished.stored
    )
    copied = [copy.target for copy in carried_out.copies] if isinstance(carried_out, Plan) else []
    num_kept = _covered(copied + [entry.span for entry in stored])
    tokens = [*prompt.tolist(), *finished.output_ids]
    if num_kept > len(tokens) or (finished.output_ids and num_kept != len(tokens)):
        raise BadReportError(f"{num_kept} tokens kept of {len(prompt)} + {len(finished.output_ids)}")
    return Kept(FinishedSequence(namespace, token_ids(tokens[:num_kept]), carried_out), stored)


def _carried_out(plan: Plan | NoPlan, used: Sequence[int]) -> Plan | NoPlan:
    """The plan with the copies that were used; what the others were to cover was computed."""
    if not used:
        return NoPlan("computed")
    if isinstance(plan, NoPlan) or len(set(used)) != len(used) or max(used) >= len(plan.copies):
        raise BadReportError("copies used that are not in the ticket")
    return replace(plan, copies=tuple(plan.copies[index] for index in sorted(used)))


def _covered(spans: Sequence[Span]) -> int:
    """How many positions from 0 on the spans cover. Raises BadReportError for gaps and overlaps."""
    end = 0
    for span in sorted(spans, key=lambda entry: entry.start):
        if span.start != end or not len(span):
            raise BadReportError(f"expected KV from position {end} on, got [{span.start}, {span.end})")
        end = span.end
    return end
