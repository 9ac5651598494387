"""`kvshare config`: what is set, by whom, and whether it can be used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from kvshare.cli.checks import check_config
from kvshare.settings import default_config_path
from tests.kvshare.cli.conftest import Kvshare

HASH = hashlib.sha256(b"key").hexdigest()


def test_show_says_where_each_value_comes_from(
    kvshare: Kvshare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is not the default, unless all is asked for; never a hash."""
    file = tmp_path / "config.yaml"
    keys = [{"name": "a", "tenant": "t", "sha256": HASH}]
    file.write_text(yaml.safe_dump({"sharing": {"min_run": 32}, "auth": {"keys": keys}}))
    monkeypatch.setenv("KVSHARE_SERVER__PORT", "9000")
    shown = kvshare("config", "show", "--config", file).stdout
    assert [line.split() for line in shown.splitlines()[1:]] == [
        ["server.port", "9000", "environment"],
        ["auth.keys", "1", "entry", "file"],
        ["sharing.min_run", "32", "file"],
    ]
    everything = kvshare("config", "show", "--all", "--config", file, "--format", "json")
    settings = everything.document["settings"]
    assert settings["sharing.mode"] == {"value": "approx", "origin": "default"}
    assert settings["sharing.min_run"] == {"value": 32, "origin": "file"}
    assert HASH not in everything.stdout


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("sharing: {min_rum: 3}", "sharing.min_rum"),
        ("auth: {keys_file: nowhere.yaml}", "nowhere.yaml"),
        ("auth: {keys_file: empty.yaml}", "empty.yaml"),
        ("auth: {keys_file: wrong.yaml}", "wrong.yaml: keys.0.tenant"),
    ],
)
def test_validate_names_what_is_wrong(kvshare: Kvshare, tmp_path: Path, text: str, path: str) -> None:
    """By its path, with the exit code of wrong settings; the file of keys is checked, too."""
    (tmp_path / "empty.yaml").write_text("keys: []")
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump({"keys": [{"name": "a", "sha256": HASH}]}))
    (tmp_path / "config.yaml").write_text(text)
    done = kvshare("config", "validate", "--config", tmp_path / "config.yaml")
    assert done.code == 2
    assert path in done.stderr
    assert path in check_config(tmp_path / "config.yaml")[1].detail  # as `kvshare doctor` has it


def test_validate_counts_what_is_there(kvshare: Kvshare, tmp_path: Path) -> None:
    """Keys and tenants of both places."""
    keys = [{"name": "a", "tenant": "t", "sha256": HASH}]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": keys, "tenants": [{"name": "u"}]}))
    (tmp_path / "config.yaml").write_text("auth: {keys_file: keys.yaml}")
    done = kvshare("config", "validate", "--config", tmp_path / "config.yaml", "--format", "json")
    assert done.document == {"valid": True, "changed": 1, "keys": 1, "tenants": 2}


def test_the_schema_takes_the_defaults_and_refuses_what_is_unknown(kvshare: Kvshare) -> None:
    """As an editor reads it: each setting has its default, and none is required."""
    schema = json.loads(kvshare("config", "schema").stdout)
    defaults = yaml.safe_load(default_config_path().read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(defaults)
    validator.validate({"sharing": {"mode": "exact"}})
    validator.validate({"store": {"kv_bytes": "4GiB"}})
    assert not validator.is_valid({"sharing": {"mode": "most"}})
    assert not validator.is_valid({"sharign": {}})
    described = schema["$defs"]["SharingSettings"]["properties"]
    assert {name: row["default"] for name, row in described.items()} == defaults["sharing"]
