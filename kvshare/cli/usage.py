"""`kvshare usage` and `kvshare tenants`: who uses a running server, how much, and within which limits."""

from __future__ import annotations

import csv
import sys
from typing import Any

import typer

from kvshare.cli.options import Csv, Format, Key, OutputFormat, Since, TenantName, Url, UsageBy
from kvshare.cli.output import show


def usage(
    by: UsageBy = "key",
    since: Since = None,
    tenant: TenantName = None,
    as_csv: Csv = False,
    url: Url = None,
    key: Key = None,
    output_format: Format = OutputFormat.TERMINAL,
) -> None:
    """Show what each key, tenant or day has used: requests, prompt tokens by source, seconds saved."""
    if as_csv and output_format is OutputFormat.JSON:
        raise typer.BadParameter("expected either --csv or --format json")
    from kvshare.cli.server import server

    query = {"by": by, "since": since, "tenant": tenant}
    document = server(url, key).call("/admin/usage", query=query)
    if as_csv:
        _write(document["rows"])
    else:
        show("usage", document, output_format)


def tenants(url: Url = None, key: Key = None, output_format: Format = OutputFormat.TERMINAL) -> None:
    """Tenants by name: their keys, their limits, and what they use of them now."""
    from kvshare.cli.server import server

    show("tenants", server(url, key).call("/admin/tenants"), output_format)


def _write(rows: list[dict[str, Any]]) -> None:
    """RFC 4180, with a header; nothing where there are no rows."""
    if rows:
        writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
