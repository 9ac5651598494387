"""`kvshare doctor` on a running server of ours: what only requests that were served could teach it."""

from __future__ import annotations

from kvshare.cli.checks import Check, first_line, found
from kvshare.cli.client import AdminClient
from kvshare.errors import KVShareError, UnreachableError

_RATES = ("load", "prefill")
_TIMEOUT_S = 3.0


def check_break_even(url: str, key: str | None) -> Check:
    """
    From how many tokens on a plan pays, by the rates that this server has measured.

    Nothing is measured here: what a prefill and a load take depends on the machine under the load it has.
    """
    try:
        costs = AdminClient(url, key=key, timeout_s=_TIMEOUT_S).ask("stats", {})["costs"]
        missing = [rate for rate in _RATES if rate not in costs["measured"]]
        tokens, pass_ms = costs["break_even_tokens"], 1e3 * costs["pass_s"]
        prefill, load = costs["prefill_tokens_per_s"], costs["load_bytes_per_s"] / 1e9
    except UnreachableError as exc:
        return found("break-even.unknown", problem=f"none answers at {url} ({exc.problem})")
    except KVShareError as exc:
        return found("break-even.unknown", problem=first_line(exc))
    except (KeyError, TypeError):
        problem = f"{url} does not say; is that a KVShare server of this version?"
        return found("break-even.unknown", problem=problem)
    if missing:
        return found("break-even.unmeasured", url=url, missing=" and ".join(missing))
    if tokens is None:
        return found("break-even.never", url=url, prefill=prefill, load=load, pass_ms=pass_ms)
    return found("break-even.known", url=url, tokens=tokens, prefill=prefill, load=load, pass_ms=pass_ms)
