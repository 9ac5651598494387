"""`log`: a log's own requests, each with the earlier ones that share most of its words."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

import xxhash

from kvshare.logs.requests import LoggedRequest
from kvshare.replay.stream import RequestStream
from kvshare_lab.fidelity.scenario import Draft, Messages, half_of
from kvshare_lab.fidelity.suites.library import Library, name_of

_MOST_REQUESTS = 20_000  # read of a log
_WORDS = 8  # of a shingle
_MOST_HOLDERS = 8  # earlier requests that are remembered for a shingle
_MOST_DONORS = 3
_LEAST_SHARED = 0.2  # of a request's shingles, by a donor


def log(library: Library, number: int, draw: random.Random) -> Draft | None:
    """One of the log's requests at random; another attempt at the same number draws another one."""
    drafts = _drafts(library.log, library.half) if library.log else ()
    return draw.choice(drafts) if drafts else None


@lru_cache(maxsize=2)
def _drafts(path: Path, half: int) -> Sequence[Draft]:
    """The drafts of this half; a request is in the half of the earlier request that shares most with it."""
    return [draft for draft in similar_requests(path) if half_of(draft.source) == half]


def similar_requests(path: Path) -> Iterator[Draft]:
    """
    Requests that share words with an earlier one, unless they only continue earlier ones.

    Raises:  LogError for a file that cannot be replayed
    """
    holders: defaultdict[int, list[int]] = defaultdict(list)
    earlier: list[Messages] = []
    sources: list[str] = []
    with RequestStream([path]) as stream:
        for messages in islice(_messages(stream), _MOST_REQUESTS):
            shingles = _shingles(messages)
            shared = Counter(number for shingle in shingles for number in holders[shingle])
            donors = [
                number
                for number, count in shared.most_common(_MOST_DONORS)
                if count >= _LEAST_SHARED * len(shingles)
            ]
            source = sources[donors[0]] if donors else name_of("log", _text(messages))
            stored = [earlier[number] for number in donors]
            if edited := tuple(old for old in stored if old != messages[: len(old)]):
                yield Draft(source=source, stored=edited, prompt=messages)
            for shingle in shingles:
                holders[shingle] = [*holders[shingle], len(earlier)][-_MOST_HOLDERS:]
            earlier.append(messages)
            sources.append(source)


def _messages(requests: Iterable[LoggedRequest]) -> Iterator[Messages]:
    """The messages of requests that have text; a prompt becomes a user's message."""
    for request in requests:
        if request.messages is not None:
            yield request.messages
        elif request.prompt is not None:
            yield ({"role": "user", "content": request.prompt},)


def _text(messages: Messages) -> str:
    return "\n".join(message["content"] for message in messages)


def _shingles(messages: Messages) -> set[int]:
    words = _text(messages).split()
    return {
        xxhash.xxh3_64_intdigest(" ".join(words[start : start + _WORDS]).encode())
        for start in range(max(1, len(words) - _WORDS + 1))
    }
