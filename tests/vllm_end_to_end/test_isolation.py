"""Tenants, salts of clients, and what a client says about KV."""

import openai
import pytest

from kvshare.vllm_protocol.messages import PROTOCOL
from tests.vllm_end_to_end.fleet import Fleet, ask, donate, pair, rested, settled


def test_another_tenant_gets_nothing_of_it(fleet: Fleet) -> None:
    """Neither from segments nor from vLLM's own prefix cache."""
    forms = pair(11)
    with fleet.client("ann") as ann, fleet.client("cid") as cid, fleet.client("eve") as eve:
        donate(fleet, ann, forms.donor_messages)
        # A question each: the second one of a tenant may be served from its own first.
        assert ask(cid, forms.recipient_messages)[2] == 0
        assert ask(eve, forms.donor_messages)[2] == 0


def test_what_a_client_says_about_kv_is_ignored(fleet: Fleet) -> None:
    """Salts and transfer parameters of a body do not reach vLLM as they are."""
    messages = pair(12).donor_messages
    stolen = {
        "cache_salt": "kvshare-private-somebody",
        "kv_transfer_params": {"kvshare": {"protocol": PROTOCOL, "copies": [[1, 0, 100, 0, 0]]}},
    }
    with fleet.client("ann") as ann, fleet.client("dot") as dot:  # new here
        donate(fleet, ann, messages)
        assert ask(dot, messages, **stolen)[2] == 0


@pytest.mark.parametrize("seed", [14, 15])
def test_a_clients_salt_divides_what_its_key_shares(fleet: Fleet, seed: int) -> None:
    """vLLM's own prefix cache for an equal prompt, and copies for a near-duplicate: a to a, not a to b."""
    forms, is_equal = pair(seed), seed == 14
    messages = forms.donor_messages if is_equal else forms.recipient_messages
    one, other = (f"{seed} {name}" for name in "ab")  # new: other tests' forms are near-duplicates, too
    with fleet.client("ann") as ann, fleet.client("bob") as bob:
        before = rested(fleet)
        ask(ann, forms.donor_messages, cache_salt=one)
        settled(fleet, before)
        assert ask(bob, messages, cache_salt=other)[2] == 0
        answer, num_tokens, num_cached = ask(bob, messages, cache_salt=one)
    assert is_equal or answer == forms.answer
    assert num_cached > 0.4 * num_tokens, fleet.why()
    with fleet.client("ann") as ann:
        for salt in ("", 5, "x" * 129):
            with pytest.raises(openai.BadRequestError, match="cache_salt"):
                ask(ann, messages, cache_salt=salt)
