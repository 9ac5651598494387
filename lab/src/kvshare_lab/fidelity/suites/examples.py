"""`fewshot`: solved examples in another order, behind which another question is asked."""

import random
from collections.abc import Sequence

from kvshare_lab.fidelity.scenario import Draft, Messages
from kvshare_lab.fidelity.suites.library import TEXTS, Asked, Library, in_turn, shortened, shuffled

_FEWEST, _MOST = 4, 9  # examples
_LONGEST = 360  # characters of an example's text


def fewshot(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    The examples of one stored prompt in another order, and another question than the stored one.

    Every third prompt leaves one example out, every third has one more.
    """
    asked = [source for source in library.marked if _is_short(source.item.whole)]
    if len(asked) < _FEWEST + 2:
        return None
    case = in_turn(asked, number)
    others = [source.item.whole for source in asked if source is not case]
    others = draw.sample(others, min(len(others), 1 + draw.randint(_FEWEST + 1, _MOST)))
    before, shown = others[0], others[1:]
    change = in_turn(("order", "fewer", "more"), number)
    now = {"order": shown, "fewer": shown[:-1], "more": shown}[change]
    stored = shown[:-1] if change == "more" else shown
    return Draft(
        source=case.name,
        stored=(_prompt(stored, before),),
        prompt=_prompt(shuffled(now, draw), case.item.whole),
        labels={"change": change, "examples": len(now)},
        reordered=_prompt(shuffled(now, draw), case.item.whole),
    )


def _is_short(asked: Asked) -> bool:
    return len(asked.text) <= _LONGEST // 2


def _prompt(examples: Sequence[Asked], question: Asked) -> Messages:
    texts = TEXTS["fewshot"]
    shown = [
        texts["example"].format(text=_text(each), question=each.text, answer=each.answer) for each in examples
    ]
    asked = texts["asked"].format(text=_text(question), question=question.text)
    return (
        {"role": "system", "content": texts["system"]},
        {"role": "user", "content": "\n\n".join([*shown, asked])},
    )


def _text(asked: Asked) -> str:
    return shortened(asked.supporting[0].text, _LONGEST) if asked.supporting else ""
