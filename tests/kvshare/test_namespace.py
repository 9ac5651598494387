"""Namespace identity is exact and framed."""

from dataclasses import fields, replace

from kvshare.namespace import Namespace

BASE = Namespace("tenant", "tenant", "model", "rev", "tok", "float32", "4x2x64", "rope")


def test_every_field_tells_namespaces_apart() -> None:
    """No field is left out of the digest."""
    digests = {BASE.digest}
    for entry in fields(Namespace):
        digests.add(replace(BASE, **{entry.name: "another"}).digest)
    assert len(digests) == 1 + len(fields(Namespace))


def test_fields_are_framed() -> None:
    """("org_1", "2345") and ("org_12345", "") are different tenants."""
    assert replace(BASE, tenant="a", scope="bc").digest != replace(BASE, tenant="ab", scope="c").digest


def test_equal_identities_meet() -> None:
    """The digest depends on nothing but the fields."""
    assert replace(BASE).digest == BASE.digest
    assert len(BASE.digest) == 64
