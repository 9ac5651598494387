"""`mosaic`: pieces of several stored threads of mail, put together in one prompt."""

import random

from kvshare.replay.workloads import sources
from kvshare_lab.fidelity.scenario import Draft, Messages
from kvshare_lab.fidelity.suites.library import TEXTS, Conversation, Library, Source, in_turn, shuffled

_NUM_THREADS = 3
_MAILS = 4  # of a thread
_SHORTEST = 500  # characters of a thread


def mosaic(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    Some mails of each of three threads, which were stored apart; pieces of one thread keep their order.

    Label `pieces`: whether threads come one after another (`blocks`) or their mails take turns (`mixed`).
    """
    threads = [source for source in library.conversations if _length(source.item) >= _SHORTEST]
    if len(threads) < _NUM_THREADS:
        return None
    first = in_turn(threads, number)
    others = draw.sample([source for source in threads if source is not first], _NUM_THREADS - 1)
    written = [_mails(source, draw) for source in (first, *others)]
    pieces = in_turn(("blocks", "mixed"), number)
    kept = [mails[draw.randint(0, 1) :] for mails in shuffled(written, draw)]
    if pieces == "mixed":
        order = shuffled([place for place, mails in enumerate(kept) for _ in mails], draw)
        rest = [iter(mails) for mails in kept]
        shown = [next(rest[place]) for place in order]
    else:
        shown = [mail for mails in kept for mail in mails]
    ask = draw.choice(TEXTS["mosaic"]["asks"])
    return Draft(
        source=first.name,
        stored=tuple(_prompt(mails, draw.choice(TEXTS["mosaic"]["asks"])) for mails in written),
        prompt=_prompt(shown, ask),
        labels={"pieces": pieces},
    )


def _length(thread: Conversation) -> int:
    return sum(len(message["content"]) for message in thread[:_MAILS])


def _mails(source: Source[Conversation], draw: random.Random) -> list[str]:
    people = {"user": sources.person(draw), "assistant": sources.person(draw)}
    return [
        TEXTS["mosaic"]["mail"].format(
            person=people[message["role"]],
            date=sources.date(draw),
            clock=sources.clock(draw),
            text=message["content"],
        )
        for message in source.item[:_MAILS]
    ]


def _prompt(mails: list[str], ask: str) -> Messages:
    return (
        {"role": "system", "content": TEXTS["mosaic"]["system"]},
        {"role": "user", "content": "\n\n".join([*mails, ask])},
    )
