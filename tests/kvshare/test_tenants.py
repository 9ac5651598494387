"""Whose namespaces are, by name: noted, kept over a restart, and forgotten with the prompts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvshare.namespace import Owner
from kvshare.tenants import NAMESPACES_FILE, NamespaceOwner, Tenants, named, owner_of_key

SHARED, DIVIDED, PRIVATE = ("a" * 64, "b" * 64, "c" * 64)


def noted() -> Tenants:
    tenants = Tenants()
    tenants.note(SHARED, Owner("acme", "tenant"))
    tenants.note(DIVIDED, Owner("acme", "tenant").divided("salt"))
    tenants.note(PRIVATE, owner_of_key("acme", "private", "carol"))
    tenants.note("d" * 64, Owner("globex", "tenant"))
    return tenants


@pytest.mark.parametrize("tenant", ["acme", '["acme", "x"]', "", "a\nb", "*"])
@pytest.mark.parametrize("scope", ["tenant", "private"])
def test_owners_have_their_names_back(tenant: str, scope: str) -> None:
    """Whatever a tenant is called, also like a private key's space."""
    owner = named(owner_of_key(tenant, scope, "key"))
    assert owner == NamespaceOwner(tenant, scope, "key" if scope == "private" else None)


def test_a_tenant_has_all_its_namespaces() -> None:
    """Shared, private and divided ones."""
    tenants = noted()
    assert set(tenants.namespaces_of("acme")) == {SHARED, DIVIDED, PRIVATE}
    assert tenants.owner_of(DIVIDED) == NamespaceOwner("acme", "tenant", is_divided=True)
    assert tenants.namespaces_of("nobody") == ()
    assert tenants.owner_of("e" * 64) is None


def test_they_are_known_again_after_a_restart(tmp_path: Path) -> None:
    """From a file that only this user may read."""
    noted().save(tmp_path)
    again = Tenants()
    again.load(tmp_path)
    assert again.all() == noted().all()
    assert (tmp_path / NAMESPACES_FILE).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 2, "namespaces": {}}', '{"version": 1, "namespaces": {"x": {}}}']
)
def test_a_damaged_file_is_one_warning(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """And what was noted meanwhile stays."""
    (tmp_path / NAMESPACES_FILE).write_text(text)
    tenants = noted()
    with caplog.at_level(logging.WARNING):
        tenants.load(tmp_path)
    assert len(caplog.records) == 1
    assert tenants.all() == noted().all()


def test_nothing_is_kept_without_a_folder_and_a_full_disk_is_no_error(tmp_path: Path) -> None:
    noted().save(None)
    noted().save(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


def test_namespaces_without_prompts_are_forgotten() -> None:
    """Clients may name any number of salts. One that was just used may get its prompt yet."""
    tenants = noted()
    tenants.forget_all_but({SHARED})
    assert len(tenants.all()) == 4
    tenants.note(PRIVATE, owner_of_key("acme", "private", "carol"))
    tenants.forget_all_but({SHARED})
    assert set(tenants.all()) == {SHARED, PRIVATE}
    tenants.forget_all_but({SHARED})
    assert set(tenants.all()) == {SHARED}
