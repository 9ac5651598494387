"""`language`: texts in German and in Chinese, edited or in another order."""

import random
import re
from collections.abc import Sequence

from kvshare_lab.fidelity.scenario import Draft, Messages
from kvshare_lab.fidelity.suites.library import TEXTS, Library, Source, in_turn, shuffled

_NUM_PIECES = 4, 7
_NUMBER = re.compile(r"\d+")


def language(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    Pieces of news. Labels: the `language`; `change`: figures were replaced (`edit`), the pieces come in
    another order (`order`), or another piece came in front (`added`).
    """
    spoken = in_turn(("de", "zh"), number)
    pieces = library.foreign.get(spoken, ())
    if len(pieces) <= _NUM_PIECES[1]:
        return None
    first = in_turn(pieces, number // 2)
    others = [source for source in pieces if source is not first]
    added, *rest = draw.sample(others, draw.randint(*_NUM_PIECES))
    shown = _texts([first, *rest])
    change = in_turn(("edit", "order", "added"), number // 2)
    now = {
        "edit": lambda: _refigured(shown, draw),
        "order": lambda: shuffled(shown, draw),
        "added": lambda: [added.item, *shown],
    }[change]()
    texts = TEXTS["language"][spoken]
    return Draft(
        source=first.name,
        stored=(_prompt(texts, shown, draw),),
        prompt=_prompt(texts, now, draw),
        labels={"language": spoken, "change": change},
    )


def _texts(sources: Sequence[Source[str]]) -> list[str]:
    return [source.item for source in sources]


def _refigured(texts: Sequence[str], draw: random.Random) -> list[str]:
    """The texts with one or two figures replaced; without figures, with two sentences exchanged."""
    places = [place for place, text in enumerate(texts) if _NUMBER.search(text)]
    found = list(texts)
    for place in draw.sample(places, min(len(places), draw.randint(1, 2))):
        found[place] = _NUMBER.sub(lambda _: str(draw.randint(2, 98)), found[place], count=1)
    return found if places else shuffled(found, draw)


def _prompt(texts: dict[str, list[str]], pieces: Sequence[str], draw: random.Random) -> Messages:
    ask = draw.choice(texts["asks"])
    return (
        {"role": "system", "content": texts["system"][0]},
        {"role": "user", "content": "\n\n".join([*pieces, ask])},
    )
