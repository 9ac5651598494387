"""config.yaml and `Settings` are in step; what does not fit is refused by its path."""

import operator
from pathlib import Path

import pydantic
import pytest
import yaml

from kvshare.errors import ConfigError
from kvshare.served_index import nominator_settings
from kvshare.settings import (
    ReplicaSettings,
    Settings,
    SettingsSource,
    TenantSettings,
    access_of,
    default_config_path,
    flattened,
    load_settings,
)
from kvshare.settings.reading import Origin


def test_config_yaml_holds_every_setting_and_no_other() -> None:
    """Each key of the file is a field and each field is in the file."""
    tree = yaml.safe_load(default_config_path().read_text(encoding="utf-8"))

    def keys(model: object) -> set[str]:
        assert isinstance(model, type)
        assert issubclass(model, pydantic.BaseModel)
        return {field.alias or name for name, field in model.model_fields.items()}

    assert set(tree) == keys(Settings)
    assert tree.pop("rules") == []  # a list: it has no keys, and by default no prompt is rewritten
    for section in tree:
        assert set(tree[section]) == keys(Settings.model_fields[section].annotation), section


def test_every_setting_says_why() -> None:
    """Each line of config.yaml with a value carries a comment, on it or above it."""
    lines = default_config_path().read_text(encoding="utf-8").splitlines()
    bare = [line for line in lines if line.startswith("  ") and ":" in line and "#" not in line]
    names = {line.split(":")[0].strip() for line in bare}
    assert names <= {"host", "level", "collection", "embed_timeout_s", "prior_load_bytes_per_s"}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("sharing: {min_rum: 3}", "sharing.min_rum"),
        ("sharing: {max_generation: 3}", "sharing.max_generation"),  # of 0.1.0
        ("sharign: {}", "sharign"),
        ("server: {port: many}", "server.port"),
        ("server: {port: 70000}", "server.port"),
        ("server: 3", "server"),
        ("sharing: {mode: sometimes}", "sharing.mode"),
        ("auth: {keys: [{name: a, sha256: abc, tenant: t}]}", "auth.keys.0.sha256"),
        ("vllm: {replicas: [{}]}", "vllm.replicas.0.url"),
        ("vllm: {replicas: [{url: 'localhost:8000'}]}", "vllm.replicas.0.url"),
        ("vllm: {replicas: [{url: 'http://host:8000/v1/'}]}", "vllm.replicas.0.url"),
        ("vllm: {replicas: [{url: 'http://user:secret@host'}]}", "vllm.replicas.0.url"),
        ("vllm: {replicas: [{url: 'http://host:80000'}]}", "vllm.replicas.0.url"),
        ("vllm: {replicas: [{url: 'http://a', control_url: 'ftp://a'}]}", "vllm.replicas.0.control_url"),
        ("rules: {name: a, match: b, action: pin}", "rules"),
        ("rules: [{name: a, match: b, action: drop}]", "rules.0.action"),
        ("rules: [{name: a, match: b, action: pin, in: [assistant]}]", "rules.0.in.0"),
        ("rules: [{name: a, match: b, action: pin, in: []}]", "rules.0.in"),
        ('rules: [{name: a, match: b, action: pin, value: "two\\nlines"}]', "rules.0.value"),
        ("rules: [{name: 'a, b', match: b, action: pin}]", "rules.0.name"),
        ("rules: [{name: a, match: '(b+)+', action: pin}]", "rules.0.match"),
        ("rules: [{name: a, match: b, action: move, value: c}]", "rules.0"),
        ("rules: [{name: a, match: b, action: move}, {name: a, match: c, action: move}]", "rules"),
    ],
)
def test_a_wrong_key_or_value_is_named_by_its_path(tmp_path: Path, text: str, path: str) -> None:
    """The operator reads which key is wrong, and what was expected."""
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    assert caught.value.key_path == path


@pytest.mark.parametrize("text", ["- a\n- b", "a: [", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    """Lists, broken YAML and binary are config errors that name the file."""
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_settings(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A typo in the path never means defaults."""
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load_settings(tmp_path / "nowhere.yaml")


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    """Each on a line of its own: the key path, what was expected, what was found."""
    file = tmp_path / "config.yaml"
    text = "server: {port: many}\nsharing: {min_rum: 3}\nindex: 3\nauth: {keys: [{name: a, sha256: ab}]}"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_settings(file, {"rules": "none"})
    lines = dict(line.split(": ", 1) for line in str(caught.value).splitlines())
    assert lines.pop("sharing.min_rum").startswith("unknown key; expected one of: calibration,")
    assert lines == {
        "index": "expected a section with keys, got 3",
        "server.port": "expected a valid integer, got 'many'",
        "auth.keys.0.sha256": "expected 64 hex digits, as `kvshare hash-key` prints them, got 2 characters",
        "auth.keys.0.tenant": "expected a value, got none",
        "rules": "expected a valid tuple, got 'none'",
    }


def test_a_file_needs_only_the_keys_it_changes(tmp_path: Path) -> None:
    """Everything else keeps its default; overrides win over the file."""
    file = tmp_path / "config.yaml"
    file.write_text("sharing: {min_run: 32}\nserver: {port: 9000}", encoding="utf-8")
    settings = load_settings(file, {"server.port": 9001})
    assert settings.sharing.min_run == 32
    assert settings.server.port == 9001
    assert settings.repair == load_settings().repair


def test_the_qdrant_address_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses and secrets stay out of files that are committed."""
    monkeypatch.setenv("KVSHARE_QDRANT_URL", "http://127.0.0.1:6333")
    assert load_settings().index.url == "http://127.0.0.1:6333"


@pytest.mark.parametrize(
    ("variable", "text", "path", "value"),
    [
        ("KVSHARE_SERVER__PORT", "9002", "server.port", 9002),
        ("KVSHARE_SHARING__MODE", "off", "sharing.mode", "off"),  # which YAML reads as false
        ("KVSHARE_STORE__PATH", "null", "store.path", None),
        ("KVSHARE_STORE__PATH", "", "store.path", None),
        ("KVSHARE_LOGGING__JSON", "true", "logging.json_lines", True),
        (
            "KVSHARE_SERVER__CORS_ORIGINS",
            '["https://a.example"]',
            "server.cors_origins",
            ("https://a.example",),
        ),
        ("KVSHARE_RULES", "[]", "rules", ()),
    ],
)
def test_a_setting_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, text: str, path: str, value: object
) -> None:
    """It wins over the file; the value is written as in YAML."""
    file = tmp_path / "config.yaml"
    file.write_text("server: {port: 9001}\nsharing: {mode: exact}\nstore: {path: other}", encoding="utf-8")
    monkeypatch.setenv(variable, text)
    assert operator.attrgetter(path)(load_settings(file)) == value


def test_every_setting_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given its own value by the environment, each has that origin, and the settings are as before."""
    before, origins = SettingsSource().read()
    assert set(origins.values()) == {Origin.DEFAULT}
    values = flattened(yaml.safe_load(default_config_path().read_text(encoding="utf-8")))
    for path, value in values.items():
        monkeypatch.setenv(f"KVSHARE_{path.upper().replace('.', '__')}", yaml.safe_dump(value))
    after, origins = SettingsSource().read()
    assert after == before
    assert origins == dict.fromkeys(values, Origin.ENVIRONMENT)


@pytest.mark.parametrize(
    ("variable", "text", "path"),
    [
        ("KVSHARE_SERVER__PROT", "1", "server.prot"),
        ("KVSHARE_SERVRE__PORT", "1", "servre"),
        ("KVSHARE_SERVER__PORT", "many", "server.port"),
        ("KVSHARE_SERVER__PORT__HIGH", "1", "server.port"),
        ("KVSHARE_SERVER__HOST", "[", "KVSHARE_SERVER__HOST"),
    ],
)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, path: str
) -> None:
    """A misspelt one is not the default without a word."""
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert caught.value.key_path == path


def test_each_value_has_an_origin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That which wins: option, environment, file, default."""
    file = tmp_path / "config.yaml"
    file.write_text("server: {port: 1, host: '::1', drain_s: 2}\nindex: {url: 'http://a'}", encoding="utf-8")
    monkeypatch.setenv("KVSHARE_SERVER__HOST", "0.0.0.0")
    monkeypatch.setenv("KVSHARE_SERVER__PORT", "2")
    monkeypatch.setenv("KVSHARE_QDRANT_URL", "http://b")
    settings, origins = SettingsSource(file, {"server.port": 3}).read()
    assert (settings.server.port, settings.server.host, settings.index.url) == (3, "0.0.0.0", "http://b")
    found = {path: origins[path] for path in ("server.port", "server.host", "server.drain_s", "index.url")}
    assert list(found.values()) == [Origin.OPTION, Origin.ENVIRONMENT, Origin.FILE, Origin.ENVIRONMENT]
    assert origins["server.keep_alive_s"] is Origin.DEFAULT


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("keys: [{name: a, sha256: KEY, tenant: t}]", "keys.0.sha256"),
        ("keys: [{name: a, tenant: t}]", "keys.0.sha256"),
        ("keys: [KEY]", "keys.0"),
        ("keys: {KEY: KEY}", "keys"),
        (f"keys: [{{name: a, sha256: {'a' * 64}, tenant: t, role: KEY}}]", "keys.0.role"),
        ("tenants: [{name: t, requests_per_minute: 0}]", "tenants.0.requests_per_minute"),
        ("tenants: [{name: t, request_per_minute: 9}]", "tenants.0.request_per_minute"),
        ("tenants: [{name: t}, {name: t}]", "tenants"),
        ("server: {port: 1}", "server"),
        ("- a", ""),
    ],
)
def test_a_wrong_file_of_keys_is_named_by_its_path(tmp_path: Path, text: str, path: str) -> None:
    """And what may be a key by mistake is not repeated."""
    file = tmp_path / "keys.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        access_of(load_settings(overrides={"auth.keys_file": str(file)}))
    assert caught.value.key_path == (f"{file}: {path}" if path else str(file))
    assert "KEY" not in str(caught.value)


def test_keys_of_both_places_are_one_list(tmp_path: Path) -> None:
    """Names, hashes and tenants that both have are refused."""
    file, one, other = tmp_path / "keys.yaml", "a" * 64, "b" * 64
    file.write_text(yaml.safe_dump({"keys": [{"name": "b", "sha256": other, "tenant": "t"}]}))
    given = {"auth.keys_file": str(file), "auth.tenants": [{"name": "*", "max_in_flight": 3}]}
    access = access_of(
        load_settings(overrides={**given, "auth.keys": [{"name": "a", "sha256": one, "tenant": "t"}]})
    )
    assert [key.name for key in access.keys] == ["a", "b"]
    assert access.limits_of("t") == TenantSettings(name="t", max_in_flight=3)
    with pytest.raises(ConfigError, match="the same sha256"):
        access_of(
            load_settings(overrides={**given, "auth.keys": [{"name": "a", "sha256": other, "tenant": "t"}]})
        )


@pytest.mark.parametrize(
    ("url", "control", "label"),
    [
        ("http://host:8000", "http://host:8001", "host:8000"),
        ("http://host:8000/", "http://host:8001", "host:8000"),
        ("https://host/llm/", "https://host:444", "host"),
        ("http://[::1]:8000", "http://[::1]:8001", "[::1]:8000"),
    ],
)
def test_a_replica_is_found_by_its_address(url: str, control: str, label: str) -> None:
    """The connector listens on the next port; the name in logs and namespaces is host and port."""
    replica = ReplicaSettings(url=url)
    assert (replica.control, replica.label) == (control, label)
    named = ReplicaSettings(url=url, control_url="http://other:1/", name="first")
    assert (named.control, named.label) == ("http://other:1", "first")


def test_each_rank_of_a_replica_is_one(tmp_path: Path) -> None:
    """By the same API; its control port and its name say which it is."""
    (replica,) = load_settings(
        overrides={"vllm.replicas": [{"url": "http://host:8000", "data_parallel_size": 3}]}
    ).vllm.replicas
    assert [rank.control for rank in replica.ranks] == [f"http://host:{port}" for port in (8001, 8002, 8003)]
    assert [rank.label for rank in replica.ranks] == ["host:8000-dp0", "host:8000-dp1", "host:8000-dp2"]
    assert {rank.url for rank in replica.ranks} == {"http://host:8000"}
    alone = replica.model_copy(update={"data_parallel_size": 1})
    assert alone.ranks == (alone,)


def test_every_setting_of_nomination_reaches_the_nominator() -> None:
    """They are handed over by name: one that is renamed on one side only would have no effect."""
    values = load_settings().index
    given = {
        "block_size": 7,
        "dense_min_tokens": 8,
        "dense_min_uncovered": 0.9,
        "embed_timeout_s": 10.0,
        "kgram": 11,
        "max_candidates": 12,
        "max_distance": 0.13,
        "search_timeout_s": 14.0,
        "window": 15,
    }
    made = nominator_settings(values.model_copy(update=given))
    assert {name: getattr(made, name) for name in given} == given
