"""`thinking`, `resubmit`, `window`: conversations that lose or change something; `chain`: edits of edits."""

import random
from collections.abc import Callable, Iterable, Iterator

from kvshare.logs.requests import Message
from kvshare.replay.workloads import sources
from kvshare.replay.workloads.chats import kept, num_chars, reworded
from kvshare_lab.fidelity.scenario import Draft, chat_of
from kvshare_lab.fidelity.suites import library as source_texts
from kvshare_lab.fidelity.suites.library import TEXTS, Conversation, Library, Source, in_turn, shortened
from kvshare_lab.fidelity.suites.slots import NEUTRAL

_SYSTEM: Message = {"role": "system", "content": sources.WORDS["window_system"]}
_THINKING_SYSTEM: Message = {"role": "system", "content": TEXTS["thinking_system"]}
_SHORTEST, _LONGEST = 1300, 3800  # characters of a conversation
_REASONING = {"short": (180, 330), "long": (480, 760)}  # characters, at least and at most
_SHORTEST_ANSWER = 200  # characters: what moves when its reasoning goes
_WINDOWS = range(1500, 3400, 200)  # characters
_LEAST_FILLED, _LEAST_SHARED = 0.7, 0.5  # of a window: by its messages, and by those of the one before
_DEPTHS = (1, 2, 4, 8, 16, 40)  # turns
_PLACES = ("front", "governing", "middle", "tail")
_FILLING = 250, 420  # characters of a passage in a chain's prompt
_NUM_NEUTRAL = 2  # paragraphs behind a chain's tail, of some 50 tokens each


def thinking(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    The last answer was stored with its reasoning, as it was generated; the next prompt has none.

    Label `reasoning`: `short`, about 40 to 80 tokens, or `long`, about 120 to 200.
    """
    if (chosen := _chosen(library, number, _reasoned)) is None:
        return None
    chat = chosen.item[: draw.choice(_reasoned(chosen.item))]
    length = in_turn(("short", "long"), number)
    reasoning = _reasoning(chat[-3]["content"], chat[-2]["content"], length, draw)
    answer = {"role": "assistant", "content": f"<think>\n{reasoning}\n</think>\n\n{chat[-2]['content']}"}
    return Draft(
        source=chosen.name,
        stored=((_THINKING_SYSTEM, *chat[:-2], answer),),
        prompt=(_THINKING_SYSTEM, *chat),
        labels={"reasoning": length},
    )


def resubmit(library: Library, number: int, draw: random.Random) -> Draft | None:
    """A few words of an earlier question change; what came after it stays."""
    if (chosen := _chosen(library, number, _ends)) is None:
        return None
    before = chosen.item[: draw.choice(_ends(chosen.item))]
    place = draw.randrange(0, len(before) - 2, 2)
    text = before[place]["content"]
    while (changed := reworded(text, draw)) == text:
        pass
    after = (*before[:place], {"role": "user", "content": changed}, *before[place + 1 :])
    return Draft(source=chosen.name, stored=((_SYSTEM, *before),), prompt=(_SYSTEM, *after))


def window(library: Library, number: int, draw: random.Random) -> Draft | None:
    """The oldest turns after a fixed system message are dropped, so that all others move forward."""
    if (chosen := _chosen(library, number, _moved)) is None:
        return None
    before, after = draw.choice(list(_moved(chosen.item)))
    return Draft(source=chosen.name, stored=((_SYSTEM, *before),), prompt=(_SYSTEM, *after))


def _moved(chat: Conversation) -> Iterator[tuple[Conversation, Conversation]]:
    """Pairs of windows of one size, one or two turns apart, of which the later one dropped something."""
    for size in _WINDOWS:
        if num_chars(chat) <= size:
            return
        windows = [kept(chat[:end], size) for end in range(1, len(chat) + 1, 2)]
        for place, before in enumerate(windows):
            for after in windows[place + 1 : place + 3]:
                is_filled = min(map(num_chars, (before, after))) >= _LEAST_FILLED * size
                if is_filled and _shared(before, after) >= _LEAST_SHARED * num_chars(after):
                    yield before, after


def _shared(before: Conversation, after: Conversation) -> int:
    """Characters of the messages that both windows have; 0 if nothing was dropped."""
    if before[0] is after[0]:
        return 0
    return num_chars([message for message in after if any(message is other for other in before)])


def _chosen(
    library: Library, number: int, ways: Callable[[Conversation], Iterable[object]]
) -> Source[Conversation] | None:
    """One of the conversations that can be used in some way, each in its turn."""
    found = [source for source in library.conversations if any(ways(source.item))]
    return in_turn(found, number) if found else None


def _ends(chat: Conversation) -> list[int]:
    """The ends of prompts that are neither too short nor too long, each after a question but the first."""
    return [end for end in range(3, len(chat) + 1, 2) if _SHORTEST <= num_chars(chat[:end]) <= _LONGEST]


def _reasoned(chat: Conversation) -> list[int]:
    """The ends whose last answer is long enough."""
    return [end for end in _ends(chat) if len(chat[end - 2]["content"]) >= _SHORTEST_ANSWER]


def _reasoning(question: str, answer: str, length: str, draw: random.Random) -> str:
    """Reasoning that may come before this answer: sentences of a pool around the answer's own."""
    least, most = _REASONING[length]
    pool = TEXTS["reasoning"]
    points = [shortened(each, 160) for each in source_texts.sentences(answer)] or [shortened(answer, 160)]
    opening, closing = draw.choice(pool["opening"]), draw.choice(pool["closing"])
    text = [opening.format(asked=" ".join(shortened(question, 80).split()))]
    for number, between in enumerate(draw.sample(pool["between"], len(pool["between"]))):
        line = between.format(sentence=" ".join(points[number % len(points)].split()))
        if sum(map(len, text)) + len(line) + len(closing) <= most:
            text.append(line)
        if sum(map(len, text)) + len(closing) >= least:
            break
    return " ".join([*text, closing])


def chain(library: Library, number: int, draw: random.Random) -> Draft | None:
    """
    A prompt of which one place is rewritten in every turn; the question is about a fact that stays.

    Places: `front`, two to four lines at the top, with a date, a clock and the like; `governing`, the
    sentence of the system prompt that says how to answer; `middle`, an entry of the log before the fact;
    `tail`, an entry after it, with two neutral paragraphs between it and the question. No two turns write the
    same. Numbers take turns in depth (how many turns) and place; both are labels.
    """
    least, most = _FILLING
    texts = [source for source in library.passages if len(source.item.text) >= least]
    if len(texts) < 2:
        return None
    depth, place = in_turn(_DEPTHS, number), in_turn(_PLACES, number // len(_DEPTHS))
    first = in_turn(texts, number)
    second = draw.choice([source for source in texts if source is not first])
    fact = draw.choice(TEXTS["chain"]["facts"])
    values = [str(code) for code in draw.sample(range(1000, 10_000), 4)]
    parts = {
        "first": shortened(first.item.text, most),
        "second": shortened(second.item.text, most),
        "fact": fact["says"].format(value=values[0]),
        "neutral": "\n\n".join(draw.sample(NEUTRAL, _NUM_NEUTRAL)),
        "question": fact["asks"],
        **{name: _written(name, draw) for name in _PLACES},
    }
    written = [parts[place]]
    while len(written) <= depth:
        if (text := _written(place, draw)) not in written:
            written.append(text)
    turns = ({**parts, place: text} for text in written)
    stored, *stages, prompt = (chat_of(TEXTS["chain"], each) for each in turns)
    return Draft(
        source=first.name,
        stored=(stored,),
        prompt=prompt,
        labels={"depth": depth, "place": place},
        candidates=tuple(values),
        expected=values[0],
        stages=tuple(stages),
    )


def _written(place: str, draw: random.Random) -> str:
    """One line of this place's pool with new values; at the front, two to four lines."""
    lines = draw.sample(TEXTS["chain"][place], draw.randint(2, 4) if place == "front" else 1)
    return "\n".join(line.format(**_details(draw)) for line in lines)


def _details(draw: random.Random) -> dict[str, str | int]:
    return {
        "date": sources.date(draw),
        "clock": sources.clock(draw),
        "person": sources.person(draw),
        "other": sources.person(draw),
        "place": draw.choice(sources.PLACES),
        "product": draw.choice(sources.PRODUCTS),
        "number": draw.randint(100, 999),
        "small": draw.randint(2, 40),
    }
