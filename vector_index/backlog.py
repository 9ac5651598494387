"""Changes of the index that have to wait."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vector_index.nomination import PromptRecord

_MAX_RECORDS = 10_000  # of a backlog: they share their tokens with the tree; a text takes some KB
_MAX_DELETED = 100_000  # of all namespaces in a backlog: there may be any number of them


@dataclass(slots=True)
class Backlog:
    """
    The additions and deletions that a paused index has missed. Above 10,000 records the oldest are discarded.

    Prompt ids are never reused, so all deletions can be made before all additions.
    """

    records: dict[int, PromptRecord] = field(default_factory=dict)
    deleted: dict[str, set[int]] = field(default_factory=dict)
    num_dropped: int = 0
    num_deleted: int = 0  # prompts in `deleted`

    def __bool__(self) -> bool:
        return bool(self.records or self.deleted)

    def add(self, records: Iterable[PromptRecord]) -> None:
        """Note prompts that were not added; a known prompt is replaced."""
        for record in records:
            self.records.pop(record.prompt_id, None)
            self.records[record.prompt_id] = record
        while len(self.records) > _MAX_RECORDS:
            del self.records[next(iter(self.records))]
            self.num_dropped += 1

    def delete(self, namespace: str, prompt_ids: Sequence[int]) -> None:
        """Note prompts that were not deleted. The index may hold earlier versions of them."""
        for prompt_id in prompt_ids:
            self.records.pop(prompt_id, None)
        if self.num_deleted < _MAX_DELETED:  # the index may nominate others, which the tree no longer has
            deleted = self.deleted.setdefault(namespace, set())
            self.num_deleted += len(set(prompt_ids) - deleted)
            deleted.update(prompt_ids)
