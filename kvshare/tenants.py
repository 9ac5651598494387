"""
The owners of a store's namespaces, by name, and the bytes of KV that each tenant may have.

A namespace's digest tells nothing of its owner, so a server notes both when a request comes, and keeps the
list in the store's folder. Clients may name any number of salts: what has no prompts is forgotten.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvshare.namespace import Owner
from kvshare.whole_file import write_whole

log = logging.getLogger(__name__)

NAMESPACES_FILE = "namespaces.json"
_MAX_BYTES = 64 * 2**20  # of the file; a namespace takes some 200 bytes
_PRIVATE = "private"

MaxBytes = Callable[[str], int | None]
"""How many bytes of KV a tenant may have; None: any number."""


@dataclass(frozen=True, slots=True)
class NamespaceOwner:
    """An owner as an administrator knows it. `key`: the name of the key of a private space."""

    tenant: str
    scope: str
    key: str | None = None
    is_divided: bool = False  # by a client's salt


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    tenant: str
    scope: str
    key: str | None
    is_divided: bool


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    version: Literal[1]
    namespaces: dict[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], _Row]


def owner_of_key(tenant: str, scope: str, name: str) -> Owner:
    """All keys of a tenant have one owner; a private key has its own, which no other names give."""
    return Owner(json.dumps([tenant, name]) if scope == _PRIVATE else tenant, scope)


def named(owner: Owner) -> NamespaceOwner:
    """Return the names that `owner_of_key` was given."""
    tenant, key = owner.tenant, None
    if owner.scope == _PRIVATE:
        tenant, key = json.loads(owner.tenant)
    return NamespaceOwner(tenant, owner.scope, key, bool(owner.salt))


class Tenants:
    """The namespaces of one store, and the limits of their tenants. Thread-safe."""

    def __init__(self) -> None:
        self._owners: dict[str, NamespaceOwner] = {}
        self._recent: set[str] = set()  # noted since the last `forget_all_but`
        self._noted: set[str] = set()  # noted since the last `take_noted`
        self._lock = threading.Lock()
        self._max_bytes: MaxBytes = lambda tenant: None
        self.problem: str | None = None  # why the file could not be written; the list of parts shows it

    def use_limits(self, max_bytes: MaxBytes) -> None:
        self._max_bytes = max_bytes

    def note_named(self, namespace: str, owner: NamespaceOwner) -> None:
        """Another server knows whose this namespace is."""
        with self._lock:
            self._owners.setdefault(namespace, owner)

    def max_bytes(self, tenant: str) -> int | None:
        return self._max_bytes(tenant)

    def note(self, namespace: str, owner: Owner) -> None:
        """A request of this owner uses the namespace with this digest."""
        if namespace in self._recent:
            return
        with self._lock:
            self._recent.add(namespace)
            self._noted.add(namespace)
            self._owners[namespace] = named(owner)

    def owner_of(self, namespace: str) -> NamespaceOwner | None:
        """Return the owner; None if no request of it came, so that its tenant is not known."""
        return self._owners.get(namespace)

    def take_noted(self) -> list[tuple[str, NamespaceOwner]]:
        """The namespaces that requests, or the file, have named since the last call."""
        if not self._noted:
            return []
        with self._lock:
            noted, self._noted = self._noted, set()
            return [(digest, self._owners[digest]) for digest in noted if digest in self._owners]

    def namespaces_of(self, tenant: str) -> tuple[str, ...]:
        """Return all known namespaces of a tenant: shared, private and divided ones, in every memory."""
        with self._lock:
            return tuple(digest for digest, owner in self._owners.items() if owner.tenant == tenant)

    def all(self) -> Mapping[str, NamespaceOwner]:
        with self._lock:
            return dict(self._owners)

    def forget_all_but(self, stored: Container[str]) -> None:
        """Forget namespaces without prompts, unless a request of them came since the last call."""
        with self._lock:
            keep = {digest for digest in self._owners if digest in stored or digest in self._recent}
            self._owners = {digest: self._owners[digest] for digest in keep}
            self._noted &= keep
            self._recent.clear()

    def load(self, folder: str | Path | None) -> None:
        """Add what the file in a store's folder has. One that cannot be read is one warning."""
        path = None if folder is None else Path(folder) / NAMESPACES_FILE
        if path is None or not path.is_file():
            return
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise OSError(f"it has more than {_MAX_BYTES} bytes")
            rows = _File.model_validate_json(path.read_bytes()).namespaces
        except (OSError, ValidationError) as exc:
            problem = "is damaged or of another version" if isinstance(exc, ValidationError) else str(exc)
            log.warning(
                "%s is not used: %s; tenants of stored prompts are known once they ask", path, problem
            )
            return
        with self._lock:
            known = {digest: NamespaceOwner(**row.model_dump()) for digest, row in rows.items()}
            self._noted.update(known)
            self._owners = known | self._owners

    def save(self, folder: str | Path | None) -> None:
        """Write the file, if there is a folder. Never raises: see `problem`."""
        if folder is None:
            return
        rows = {
            digest: _Row(tenant=owner.tenant, scope=owner.scope, key=owner.key, is_divided=owner.is_divided)
            for digest, owner in self.all().items()
        }
        document = _File(version=1, namespaces=rows).model_dump_json().encode()
        try:
            write_whole(Path(folder) / NAMESPACES_FILE, document)
        except OSError as exc:
            self.problem = exc.strerror or type(exc).__name__
        else:
            self.problem = None
