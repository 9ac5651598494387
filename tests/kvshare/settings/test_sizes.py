"""Settings in bytes may have a unit, as people write sizes."""

import pydantic
import pytest
import yaml

from kvshare.errors import ConfigError
from kvshare.settings import Settings, TenantSettings, default_config_path, flattened, load_settings


def _in_bytes() -> list[str]:
    defaults = yaml.safe_load(default_config_path().read_text(encoding="utf-8"))
    return [path for path in flattened(defaults) if "bytes" in path]


@pytest.mark.parametrize("path", _in_bytes())
def test_what_is_in_bytes_may_have_a_unit(path: str) -> None:
    """As on the command line; a word that is no size is named with what was expected."""
    settings = load_settings(overrides={path: "64GiB"})
    assert flattened(settings.model_dump(by_alias=True))[path] == 64 * 2**30
    with pytest.raises(ConfigError, match=rf"{path}: expected a size such as 4GiB, .*, got '64 parsecs'"):
        load_settings(overrides={path: "64 parsecs"})


def test_a_limit_of_a_tenant_may_have_a_unit() -> None:
    """None is still no limit, and a negative one is still refused."""
    sizes = ("1.5GB", 7, None)
    assert [
        TenantSettings.model_validate({"name": "t", "max_kv_bytes": size}).max_kv_bytes for size in sizes
    ] == [
        1_500_000_000,
        7,
        None,
    ]
    with pytest.raises(pydantic.ValidationError):
        TenantSettings(name="t", max_kv_bytes=-1)


def test_large_numbers_keep_every_digit() -> None:
    """And a number that no machine has is no size."""
    settings = load_settings(overrides={"store.kv_bytes": "9007199254740993"})
    assert settings.store.kv_bytes == 2**53 + 1
    with pytest.raises(ConfigError, match="expected a size such as 4GiB"):
        load_settings(overrides={"store.kv_bytes": "9" * 400})


def test_the_schema_has_both_forms() -> None:
    """So that an editor knows the least number, and that a text is one too."""
    schema = Settings.model_json_schema()["$defs"]["StoreSettings"]["properties"]["min_free_bytes"]["anyOf"]
    assert {"minimum": 8 * 2**20, "type": "integer"} in schema
    assert {"type": "string"} in schema
