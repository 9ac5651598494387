"""Settings in bytes may have a unit, as people write sizes."""

import pydantic
import pytest
import yaml

from kvshare.errors import ConfigError
from kvshare.settings import TenantSettings, default_config_path, flattened, load_settings


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
