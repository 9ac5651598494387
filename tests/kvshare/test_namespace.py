"""Namespace identity is exact and framed; no other parts make the same composed key."""

from dataclasses import asdict, fields, replace

from hypothesis import example, given
from hypothesis import strategies as st

from delta_tree import token_ids
from delta_tree.forest import prompt_key
from kvshare.namespace import Namespace, Owner, framed_digest, joined
from kvshare.settings import KeySettings
from kvshare.vllm_protocol.salts import owner_salt, private_salt
from proxy.auth import owner_of

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


def test_namespaces_without_a_salt_keep_the_key_of_earlier_versions() -> None:
    """A store from before salts is found again."""
    assert BASE.digest == "41c3ffc88fb5a4a8f3ee9087dd0df86766d3614b174b5cbae79353c78069aef4"
    assert (
        owner_salt(Owner("acme", "tenant"))
        == "68d96685ca630a44ebe9dcce4967cc8dca9165e3553959f2ee14a4fe76483737"
    )


# What frames, separates or escapes; names that a part of another looks like; a digest; any text.
CRAFTED = st.text(st.sampled_from([*'ab:@%34A",[', "\0", "\x01", "\ud800", "\u00e9"]), max_size=6)
NAMES = st.sampled_from(["tenant", "private", "acme", Owner("acme", "tenant").divided("a").salt])
TEXTS = CRAFTED | NAMES | st.text()
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=3)
OWNERS = st.tuples(st.builds(Owner, TEXTS, TEXTS), st.lists(TEXTS, max_size=2))  # and salts
SPACES = st.builds(Namespace, **{entry.name: TEXTS for entry in fields(Namespace)})
KEYS = st.builds(
    KeySettings.model_construct,
    name=TEXTS.filter(bool),
    tenant=TEXTS.filter(bool),
    scope=st.sampled_from(["tenant", "private"]),
)


def divided(owner: Owner, salts: list[str]) -> Owner:
    for salt in salts:
        owner = owner.divided(salt)
    return owner


@given(st.lists(TEXTS, max_size=4), st.lists(TEXTS, max_size=4))
@example(["a", "bc"], ["ab", "c"])
@example(["a:b"], ["a", "b"])
@example(["a%3Ab"], ["a:b"])
@example(["a@b", ""], ["a", "b@"])
@example(["", ""], [""])
def test_other_parts_give_another_string(one: list[str], other: list[str]) -> None:
    """However they are written: text moved from one part to the next, separators and escapes in them."""
    assert (framed_digest(b"d", one) == framed_digest(b"d", other)) is (one == other)
    if one and other:  # no part at all looks like an empty one
        for sign in ":@":
            assert (joined(one, by=sign) == joined(other, by=sign)) is (one == other)


@given(SPACES, SPACES)
def test_other_fields_give_another_namespace(one: Namespace, other: Namespace) -> None:
    """Any two, and two with the same values in other fields."""
    first, *rest = asdict(one).values()
    shifted = dict(zip(asdict(one), [*rest, first], strict=True))
    for each in (other, Namespace(**shifted)):
        assert (one.digest == each.digest) is (one == each)


@given(OWNERS, OWNERS)
@example((Owner("acme", "tenant"), ["a"]), (Owner("acme", "tenanta"), []))
@example((Owner("acme", "tenant"), [""]), (Owner("acme", "tenant"), []))
@example((Owner("acme", "tenant"), ["a", "b"]), (Owner("acme", "tenant"), ["ab"]))
@example((Owner("acme", "tenant"), ["a", "b"]), (Owner("acme", "tenant"), ["b", "a"]))
def test_other_owners_and_salts_give_another_key(
    one: tuple[Owner, list[str]], other: tuple[Owner, list[str]]
) -> None:
    """In the namespace as in what vLLM gets, and none of them is the salt of an approximate request."""
    owners = [divided(*one), divided(*other)]
    spaces = [replace(BASE, **asdict(owner)).digest for owner in owners]
    salts = [owner_salt(owner) for owner in owners]
    assert (spaces[0] == spaces[1]) is (salts[0] == salts[1]) is (one == other)
    assert not {private_salt(space) for space in spaces} & {*spaces, *salts}
    assert not set(spaces) & set(salts)


@given(KEYS, KEYS)
def test_other_keys_have_other_owners(one: KeySettings, other: KeySettings) -> None:
    """A tenant's keys are one owner, and each private key is one, however tenants and keys are named."""
    same_scope = (one.tenant, one.scope) == (other.tenant, other.scope)
    is_same = same_scope and (one.scope == "tenant" or one.name == other.name)
    assert (owner_of(one) == owner_of(other)) is is_same


@given(st.text(), TOKENS, st.text(), TOKENS)
def test_other_prompts_have_another_key_in_the_tree(
    one: str, tokens: list[int], other: str, others: list[int]
) -> None:
    """A namespace and the tokens of a prompt in it cannot run into each other."""
    keys = [prompt_key(one, token_ids(tokens)), prompt_key(other, token_ids(others))]
    assert (keys[0] == keys[1]) is ((one, tokens) == (other, others))
