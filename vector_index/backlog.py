"""Changes of the index that have to wait."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from vector_index.nomination import PromptRecord

_MAX_RECORDS = 10_000  # of a backlog: they share their tokens with the tree
_MAX_TEXT_CHARS = 32 * 2**20  # of all their texts
_MAX_DELETED = 100_000  # of all namespaces in a backlog: there may be any number of them


@dataclass(slots=True)
class Backlog:
    """
    The additions and deletions that a paused index has missed. Above 10,000 records the oldest are discarded;
    where texts take too much, records are kept without: they are found by their tokens.

    Prompt ids are never reused, so all deletions can be made before all additions.
    """

    records: dict[int, PromptRecord] = field(default_factory=dict)
    deleted: dict[str, set[int]] = field(default_factory=dict)
    num_dropped: int = 0
    num_deleted: int = 0  # prompts in `deleted`
    num_text_chars: int = 0  # of `records`

    def __bool__(self) -> bool:
        return bool(self.records or self.deleted)

    def add(self, records: Iterable[PromptRecord]) -> None:
        """Note prompts that were not added; a known prompt is replaced."""
        for record in records:
            self.take([record.prompt_id])
            if self.num_text_chars + _num_chars(record) > _MAX_TEXT_CHARS:
                record = replace(record, prompt_text=None)
            self.records[record.prompt_id] = record
            self.num_text_chars += _num_chars(record)
        while len(self.records) > _MAX_RECORDS:
            self.take([next(iter(self.records))])
            self.num_dropped += 1

    def take(self, prompt_ids: Iterable[int]) -> list[PromptRecord]:
        """Remove these prompts, and return those that were to be added."""
        taken = [one for entry in prompt_ids if (one := self.records.pop(entry, None)) is not None]
        self.num_text_chars -= sum(map(_num_chars, taken))
        return taken

    def delete(self, namespace: str, prompt_ids: Sequence[int]) -> None:
        """Note prompts that were not deleted. The index may hold earlier versions of them."""
        self.take(prompt_ids)
        if self.num_deleted < _MAX_DELETED:  # the index may nominate others, which the tree no longer has
            deleted = self.deleted.setdefault(namespace, set())
            self.num_deleted += len(set(prompt_ids) - deleted)
            deleted.update(prompt_ids)


def _num_chars(record: PromptRecord) -> int:
    text = record.prompt_text
    return 0 if text is None else len(text.last_user_turn) + len(text.body)
