"""`kvshare config`: the settings with their origins, checked, as a schema; on a running server, changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer

from kvshare.cli.options import Config, Format, Key, OutputFormat, SettingPath, SettingValue, ShowAll, Url
from kvshare.cli.output import show

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show, check and change settings.")


@app.command("show")
def show_settings(
    config: Config = None,
    url: Url = None,
    key: Key = None,
    everything: ShowAll = False,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """The settings that are not the defaults, and where each comes from; with --url those of a server."""
    if url is not None:
        from kvshare.cli.server import server

        document = server(url, key).call("/admin/settings")
    else:
        document = {"settings": _described(config)}
    if output_format is OutputFormat.TERMINAL:
        rows = [{"path": path, **row} for path, row in document["settings"].items()]
        chosen = [row for row in rows if everything or row["origin"] != "default"]
        document = {"rows": [{**row, "text": _short(row["value"])} for row in chosen]}
    show("config", document, output_format)


@app.command("validate")
def validate(config: Config = None, output_format: Format = OutputFormat.TERMINAL) -> None:
    """Check the settings, also those of the environment, and the file of keys. Names each mistake."""
    from kvshare.settings import SettingsSource, access_of

    settings, origins = SettingsSource(config).read()
    access = access_of(settings)
    changed = sum(origin != "default" for origin in origins.values())
    names = dict.fromkeys([*(key.tenant for key in access.keys), *(each.name for each in access.tenants)])
    counts = {"changed": changed, "keys": len(access.keys), "tenants": len(names)}
    show("config_valid", {"valid": True, **counts}, output_format)


@app.command("schema")
def schema() -> None:
    """The settings as a JSON Schema, for editors; with the defaults."""
    typer.echo(json.dumps(_schema(), indent=2))


@app.command("set")
def set_setting(
    path: SettingPath,
    value: SettingValue,
    url: Url = None,
    key: Key = None,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Change a setting of a running server until it stops: the mode, the log level, limits."""
    import yaml

    from kvshare.cli.server import server

    wanted = yaml.safe_load(value)
    if path.endswith("mode") and wanted is False:
        wanted = "off"  # as YAML reads it
    show("reloaded", server(url, key).call("/admin/settings", body={path: wanted}), output_format)


@app.command("reload")
def reload(url: Url = None, key: Key = None, output_format: Format = OutputFormat.TERMINAL) -> None:
    """Let a running server read its files of settings and keys again, as SIGHUP does."""
    from kvshare.cli.server import server

    show("reloaded", server(url, key).call("/admin/reload", body={}), output_format)


def _described(config: Any) -> dict[str, dict[str, Any]]:
    """Value and origin of each setting, without hashes of keys."""
    from kvshare.settings import SettingsSource, flattened

    settings, origins = SettingsSource(config).read()
    values = flattened(settings.model_dump(mode="json", by_alias=True))
    values["auth.keys"] = [key.model_dump(exclude={"sha256"}) for key in settings.auth.keys]
    return {path: {"value": value, "origin": origins[path]} for path, value in values.items()}


def _short(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return f"{len(value)} {'entry' if len(value) == 1 else 'entries'}"
    return json.dumps(value)


def _schema() -> dict[str, Any]:
    from kvshare.settings import Settings, default_config_path

    document = Settings.model_json_schema(by_alias=True)
    import yaml

    defaults: dict[str, Any] = yaml.safe_load(default_config_path().read_text(encoding="utf-8"))
    document.pop("required")  # a file needs only what it changes
    for section, of_section in defaults.items():
        row = document["properties"][section]
        if not isinstance(of_section, Mapping):
            row["default"] = of_section
            continue
        described = document["$defs"][row["$ref"].rpartition("/")[2]]
        described.pop("required", None)
        for name, value in of_section.items():
            described["properties"][name]["default"] = value
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}
