"""Segments in a real Redis: who may read them, what is never served, and a store that fails."""

import logging
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from delta_tree import SegmentId
from kvshare.errors import ConfigError
from kvshare.settings import load_settings
from kvshare.tiers.lower_tier import BusyError
from kvshare.tiers.shared_backend import MOST_FAILURES, BackendError, Breaker
from kvshare.tiers.shared_start import open_shared_tier
from kvshare.tiers.shared_tier import SharedTier
from tests.kvshare.tiers.stored import LAYOUT, form, is_same, segment
from tests.redis_server import PASSWORD, RedisServer, needs_redis, redis_at

pytestmark = needs_redis
KEY, OTHER_KEY = "ab" * 32, "cd" * 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_at(tmp_path_factory.mktemp("redis")) as started:
        yield started


_OPENED: list[SharedTier] = []


@pytest.fixture(autouse=True)
def _emptied(server: RedisServer) -> Iterator[None]:
    with server.client() as client:
        client.flushall()
        yield
    while _OPENED:
        _OPENED.pop().close()


def tier(server: RedisServer, *parts: str, seal: str | None = None, **settings: object) -> SharedTier:
    if seal is not None:
        file = server.folder / f"seal-{seal[:2]}"
        file.write_text(seal)
        settings["seal_key_file"] = str(file)
    _OPENED.append(open_shared_tier(server.settings(**settings), form(LAYOUT, *parts)))
    return _OPENED[-1]


def only_value(server: RedisServer) -> bytes:
    """The name of the one segment in the store."""
    (key,) = server.client().keys("kvshare1:*:o:*")
    return bytes(key)


@pytest.mark.parametrize("seal", [None, KEY])
def test_what_one_writes_another_reads(server: RedisServer, seal: str | None) -> None:
    described, kv = segment(1)
    one, other = tier(server, seal=seal), tier(server, seal=seal)
    one.write(described, kv.rows())
    other.adopt([described])
    assert is_same(other.read(described.segment_id), kv)
    assert (other.num_bytes, other.counts["read"], one.counts["written"]) == (described.num_bytes, 1, 1)
    assert 0 < server.client().ttl(only_value(server)) <= 86400


def test_a_server_that_was_told_nothing_has_nothing(server: RedisServer) -> None:
    described, kv = segment(1)
    tier(server).write(described, kv.rows())
    assert tier(server).read(described.segment_id) is None


def test_models_and_tenants_are_apart(server: RedisServer) -> None:
    """The same id: of another model, and of another namespace."""
    described, kv = segment(1)
    tier(server).write(described, kv.rows())
    of_other_model = tier(server, "another model")
    of_other_model.adopt([described])
    assert of_other_model.read(described.segment_id) is None
    foreign = type(described)(
        described.segment_id, "cd" * 32, 0, described.num_tokens, 0, described.num_bytes, described.checksum
    )
    of_other_tenant = tier(server)
    of_other_tenant.adopt([foreign])
    assert of_other_tenant.read(described.segment_id) is None
    assert len(of_other_model) == len(of_other_tenant) == 0


def test_a_value_under_the_name_of_another_is_not_served(server: RedisServer) -> None:
    """Sealed or not: a store that mixes up its values, or a neighbour who copies one over another."""
    for seal in (None, KEY):
        server.client().flushall()
        (one, kv), (other, _) = segment(1), segment(2)
        writer = tier(server, seal=seal)
        writer.write(one, kv.rows())
        client = server.client()
        client.set(writer.store.segment_key(other), client.get(only_value(server)))
        reader = tier(server, seal=seal)
        reader.adopt([one, other])
        assert is_same(reader.read(one.segment_id), kv)
        assert reader.read(other.segment_id) is None
        assert (reader.counts["damaged"], len(reader)) == (1, 1)


@pytest.mark.parametrize("seal", [None, KEY])
def test_any_changed_byte_is_a_miss(server: RedisServer, seal: str | None) -> None:
    """In the header, in its padding's neighbours, in each plane, and at the end; and a value that is cut."""
    described, kv = segment(1)
    tier(server, seal=seal).write(described, kv.rows())
    name, client = only_value(server), server.client()
    whole = client.get(name)
    text_end = whole.rstrip(b" ").find(b"}}") if seal is None else 200
    places = [0, 7, 9, 100, text_end, len(whole) - 1, len(whole) - kv.num_bytes // 2 - 1]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1
        client.set(name, bytes(changed))
        reader = tier(server, seal=seal)
        reader.adopt([described])
        rows = reader.read(described.segment_id)
        assert rows is None, place
        assert reader.counts["damaged"] == 1
    for length in (0, 8, 4096, len(whole) - 1):
        client.set(name, whole[:length])
        reader = tier(server, seal=seal)
        reader.adopt([described])
        assert reader.read(described.segment_id) is None, length


def test_sealed_values_tell_nothing_and_need_the_key(server: RedisServer) -> None:
    described, kv = segment(1)
    writer = tier(server, seal=KEY)
    writer.write(described, kv.rows())
    value = server.client().get(only_value(server))
    assert kv.rows()[0][0].tobytes() not in value
    assert described.namespace.encode() not in value
    others = tier(server, seal=OTHER_KEY), tier(server)
    for other in others:  # they do not even look under the same name
        other.adopt([described])
        assert other.store.segment_key(described) != writer.store.segment_key(described)
        assert other.read(described.segment_id) is None
    for other in others:
        server.client().set(other.store.segment_key(described), value)
        other.adopt([described])
        assert other.read(described.segment_id) is None
        assert other.counts["damaged"] == 1


def test_what_is_not_sealed_is_refused_where_there_is_a_key(server: RedisServer) -> None:
    described, kv = segment(1)
    plain, sealing = tier(server), tier(server, seal=KEY)
    plain.write(described, kv.rows())
    server.client().rename(only_value(server), sealing.store.segment_key(described))
    sealing.adopt([described])
    assert sealing.read(described.segment_id) is None
    assert sealing.counts["damaged"] == 1


def test_a_value_that_ended_is_a_miss_and_a_use_keeps_it(server: RedisServer) -> None:
    described, kv = segment(1)
    reader = tier(server)
    reader.write(described, kv.rows())
    server.client().expire(only_value(server), 100)
    assert reader.read(described.segment_id) is not None
    assert server.client().ttl(only_value(server)) > 1000
    server.client().delete(only_value(server))
    assert reader.read(described.segment_id) is None
    assert (reader.counts["failed"], len(reader), reader.num_bytes) == (1, 0, 0)


def test_a_server_that_hangs_is_left_alone(server: RedisServer) -> None:
    """Each call ends in its time; after some of them none is made; what is held stays."""
    described, kv = segment(1)
    tier(server).write(described, kv.rows())
    reader = tier(server, timeout_s=0.2)
    reader.adopt([described])
    server.process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(MOST_FAILURES):
            with pytest.raises(BusyError):
                reader.read(described.segment_id)
        assert reader.store.breaker.is_open
        assert reader.problem == "it does not answer in time"
        began = time.perf_counter()
        for _ in range(1000):
            with pytest.raises(BusyError):
                reader.read(described.segment_id)
        assert time.perf_counter() - began < 1000 * 0.2 / 2
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert described.segment_id in reader


def test_the_breaker_tries_once_after_the_pause() -> None:
    now, calls = [0.0], [0]

    def fails() -> None:
        calls[0] += 1
        raise BackendError("no")

    breaker = Breaker(lambda: now[0])
    for _ in range(10):
        with pytest.raises(BackendError):
            breaker.call(fails)
    assert calls == [MOST_FAILURES]
    now[0] = 11.0
    for _ in range(10):
        with pytest.raises(BackendError):
            breaker.call(fails)
    assert calls == [MOST_FAILURES + 1]
    now[0] = 22.0
    assert breaker.call(lambda: 5) == 5
    assert breaker.reason is None


def test_a_full_store_says_what_to_do(tmp_path: Path) -> None:
    described, kv = segment(1, 4000)
    with redis_at(tmp_path, "--maxmemory", "1500kb", "--maxmemory-policy", "noeviction") as small:
        writer = tier(small)

        def fill() -> None:
            for number in range(100):
                writer.write(replace(described, segment_id=SegmentId(number)), kv.rows())

        with pytest.raises(BackendError, match="maxmemory-policy"):
            fill()


def test_tls_with_our_certificate_only(tmp_path: Path) -> None:
    described, kv = segment(1)
    with redis_at(tmp_path, tls=True) as secured:
        tier(secured).write(described, kv.rows())
        reader = tier(secured)
        reader.adopt([described])
        assert is_same(reader.read(described.segment_id), kv)
        stranger = tier(secured, ca_file=None)
        with pytest.raises(BackendError, match="certificate"):
            stranger.write(described, kv.rows())


def test_a_wrong_password_is_said_and_not_quoted(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = server.folder / "wrong"
    wrong.write_text("another secret")
    described, kv = segment(1)
    with caplog.at_level(logging.DEBUG), pytest.raises(BackendError, match="user name or password") as error:
        tier(server, password_file=str(wrong)).write(described, kv.rows())
    assert "another secret" not in caplog.text + repr(error.value) + repr(error.value.__cause__)


def test_passwords_come_from_the_environment(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHARE_REDIS_PASSWORD", PASSWORD)
    monkeypatch.setenv("KVSHARE_SEAL_KEY", KEY)
    described, kv = segment(1)
    writer = tier(server, password_file=None)
    writer.write(described, kv.rows())
    assert writer.store.seal.seals


@pytest.mark.parametrize(
    ("setting", "value", "match"),
    [
        ("url", "http://localhost", "expected redis://"),
        ("url", "redis://user:secret@localhost", "no user name or password"),
        ("url", "redis://localhost/first", "expected redis://"),
        ("cert_file", "a.pem", "cert_file and cert_key_file"),
        ("keep_s", 5, "60"),
    ],
)
def test_settings_that_cannot_be_meant(setting: str, value: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        load_settings(overrides={f"shared_tier.{setting}": value})
    assert "secret" not in str(error.value)


def test_other_machines_are_used_only_if_that_is_safe(tmp_path: Path) -> None:
    def opened(**given: object) -> SharedTier:
        overrides = {f"shared_tier.{name}": value for name, value in given.items()}
        return open_shared_tier(load_settings(overrides=overrides).shared_tier, form())

    key = tmp_path / "key"
    key.write_text(KEY)
    with pytest.raises(ConfigError, match="trusted"):
        opened(url="redis://10.0.0.9:6379/0")
    opened(url="redis://10.0.0.9:6379/0", trusted=True)
    opened(url="redis://10.0.0.9:6379/0", seal_key_file=str(key))
    opened(url="rediss://10.0.0.9:6379/0")
    key.write_text("short")
    with pytest.raises(ConfigError, match="32 bytes") as error:
        opened(url="rediss://10.0.0.9:6379/0", seal_key_file=str(key))
    assert "short" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        opened(url="rediss://10.0.0.9:6379/0", password_file=str(tmp_path / "missing"))
