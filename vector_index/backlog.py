"""
The additions and deletions that a paused index has missed. The indexer makes them up later.

Prompt ids are never reused, so all deletions can be made before all additions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vector_index.nomination import PromptRecord

_MAX_RECORDS = 10_000  # they share their tokens with the tree; a text takes some KB


@dataclass(slots=True)
class Backlog:
    """Records to add and prompts to delete. Above 10,000 records the oldest are discarded."""

    records: dict[int, PromptRecord] = field(default_factory=dict)
    deleted: dict[str, set[int]] = field(default_factory=dict)
    num_dropped: int = 0

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
        self.deleted.setdefault(namespace, set()).update(prompt_ids)
