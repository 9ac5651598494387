"""
`kvshare doctor` on running servers. Of a vLLM: is it up, does it run KVShare's connector, and is it set up as
it must be. Of ours: from which length on sharing pays, by the requests that it served.

Asks vLLM's own routes, the connector's control server, and our admin routes. It computes one token, changes
no setting and reads nothing of what others asked.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvshare import __version__
from kvshare.addresses import SERVER_NAME
from kvshare.cli.checks import Check, first_line, found
from kvshare.cli.client import AdminClient, AnswerError, JsonClient
from kvshare.cli.costs import disk_break_even, in_words
from kvshare.errors import KVShareError, UnreachableError, UpstreamError, WrongServerError
from kvshare.fleet.client import API_KEY_VARIABLE, NO_ROUTE, ControlClient
from kvshare.grammar_pool.vllm_formats import has_xgrammar
from kvshare.vllm_protocol.json_fields import WireError
from kvshare.vllm_protocol.messages import PROTOCOL
from kvshare.vllm_protocol.replica_info import ReplicaInfo
from kvshare.vllm_protocol.versions import TESTED, only_read, untested

if TYPE_CHECKING:
    from kvshare.settings import ReplicaSettings

_LOCKED = (401, 403)
_TIMEOUT_S = 3.0  # of our own server
_JUDGED = {
    "kv_load_failure_policy": ("policy", "recompute"),
    "prefix_caching": ("prefixes", True),
    "prompt_tokens_details": ("details", True),
}
"""Settings that sharing depends on: the name of their check, what they must be. Others are only shown."""


def check_replicas(replicas: Sequence[ReplicaSettings]) -> list[Check]:
    """The findings of each vLLM that the settings name."""
    checks = (check_vllm(each.url, [rank.control for rank in each.ranks]) for each in replicas)
    return list(chain.from_iterable(checks)) or [found("vllm.none")]


def check_formats() -> Check:
    """Check with which libraries the proxy tries formats of answers before vLLM gets them."""
    return found("formats.all libraries" if has_xgrammar() else "formats.one library")


def check_vllm(url: str, control_urls: Sequence[str]) -> list[Check]:
    """vLLM's own findings, then those of each rank's connector; without those whose answer did not come."""
    server = JsonClient(url, key=os.environ.get(API_KEY_VARIABLE))
    checks, models = _check_server(server, url)
    if models:
        checks.append(_probe_render(server, str(models[0]["id"])))
    infos = []
    for control_url in control_urls:
        info, answers = asyncio.run(_check_control(control_url))
        checks.append(answers)
        if info is not None:
            checks += _check_info(info, models)
            infos.append(info)
    if infos:  # what all ranks report alike
        size, known = infos[0].data_parallel_size, len(control_urls)
        if size > known:
            checks.append(found("ranks.missing", size=size, known=known))
        elif size > 1:  # a rank too many has been found silent
            checks.append(found("ranks.all", size=size))
        checks += _check_settings(infos[0].settings)
    if models and (not infos or "prompt_tokens_details" not in infos[0].settings):
        checks.append(_probe_details(server, str(models[0]["id"])))
    return checks


def _check_server(server: JsonClient, url: str) -> tuple[list[Check], Sequence[Mapping[str, Any]]]:
    """Check what vLLM says of itself, and which models it serves."""
    try:
        server.send("/health")
    except UnreachableError as exc:
        return [found("vllm.silent", url=url, problem=exc.problem)], ()
    except AnswerError as exc:
        return [found("vllm.dead", status=exc.status, problem=exc.message)], ()
    if server.server_name == SERVER_NAME:
        return [found("vllm.kvshare", url=url)], ()
    checks = [found("vllm.healthy", url=url), _check_version(server)]
    try:
        models = server.call("/v1/models")["data"]
        names = ", ".join(str(model["id"]) for model in models)
    except (KVShareError, KeyError, TypeError) as exc:
        locked = isinstance(exc, AnswerError) and exc.status in _LOCKED
        refused = found("models.locked" if locked else "models.unknown", problem=first_line(exc))
        return [*checks, refused], ()
    return [*checks, found("models.served", names=names)], models


def _check_version(server: JsonClient) -> Check:
    try:
        version = str(server.call("/version")["version"])
    except (KVShareError, KeyError) as exc:
        return found("version.unknown", problem=first_line(exc))
    if (reason := untested(version)) is not None:
        return found("version.untested", reason=reason, tested=",".join(TESTED))
    if (reason := only_read(version)) is not None:
        return found("version.read", reason=reason, tested=",".join(TESTED))
    return found("version.tested", version=version)


async def _check_control(url: str) -> tuple[ReplicaInfo | None, Check]:
    """Check whether the connector answers. Returns what it says of itself."""
    try:
        async with ControlClient(url) as control:
            info = await control.info()
    except WrongServerError as exc:
        return None, found("control.kvshare", problem=exc)
    except UpstreamError as exc:
        if isinstance(exc.__cause__, WireError):
            return None, found("protocol.other", problem=exc.__cause__)
        kind = "locked" if exc.status in _LOCKED else "silent" if exc.status is None else "unknown"
        return None, found(f"control.{kind}", problem=exc)
    return info, found("control.answers", url=url, protocol=PROTOCOL)


def _check_info(info: ReplicaInfo, models: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Check what the connector says of its model, its limits and its memory."""
    served = {str(model.get(name)) for model in models for name in ("id", "root")}
    if served and info.model not in served:
        yield found("model.elsewhere", model=info.model)
    for refusal in info.refusals:
        yield found("sharing.none", reason=refusal)
    if info.passing:
        yield found("sharing.passing", reason=info.passing)
    if info.shares:
        yield found("sharing.all" if info.can_move_keys else "sharing.prefixes")
    for warning in info.warnings:
        yield found("connector.warns", warning=warning)
    if info.disk_problem.reason:
        yield found("connector.disk", reason=info.disk_problem.reason)
    there = info.versions.get("kvshare", "unknown")
    yield found("kvshare.same" if there == __version__ else "kvshare.other", there=there, here=__version__)
    small = info.max_bytes < info.bytes_per_token * info.max_model_len
    yield found(
        "memory.small" if small else "memory.enough",
        used=info.num_bytes / 2**30,
        most=info.max_bytes / 2**30,
        num_segments=info.num_segments,
    )


def _check_settings(settings: Mapping[str, Any]) -> Iterator[Check]:
    """vLLM's settings, of those that the connector reports."""
    for name in _JUDGED:
        if name in settings:
            yield _judged(name, settings[name])
    others = ", ".join(f"{name} {value}" for name, value in settings.items() if name not in _JUDGED)
    if others:
        yield found("settings.others", settings=others)


def _judged(setting: str, value: object) -> Check:
    check, wanted = _JUDGED[setting]
    return found(f"{check}.good" if value == wanted else f"{check}.bad", value=value)


def _probe_render(server: JsonClient, model: str) -> Check:
    """Check for vLLM's `/render` routes, by which requests other than chats are planned."""
    try:
        server.send("/v1/completions/render", body={"model": model, "prompt": "a", "max_tokens": 1})
    except KVShareError as exc:
        is_missing = isinstance(exc, AnswerError) and exc.status in NO_ROUTE
        return found("render.missing" if is_missing else "render.unknown", problem=first_line(exc))
    return found("render.answers")


def _probe_details(server: JsonClient, model: str) -> Check:
    """Check whether vLLM counts cached tokens in its answers, which only an answer shows."""
    try:
        answer = server.call("/v1/completions", body={"model": model, "prompt": "a", "max_tokens": 1})
    except KVShareError as exc:
        return found("details.not asked", problem=first_line(exc))
    reported = (answer.get("usage") or {}).get("prompt_tokens_details") is not None
    return _judged("prompt_tokens_details", reported)


def check_costs(url: str, key: str | None) -> list[Check]:
    """
    What prefills and loads take, and from how many tokens on a plan pays, by what this server has measured.

    Nothing is measured here: it depends on the machine under the load that it has.
    """
    try:
        costs = AdminClient(url, key=key, timeout_s=_TIMEOUT_S).stats().get("costs")
        said = in_words(costs)
    except UnreachableError as exc:
        return [found("break-even.unknown", problem=f"none answers at {url} ({exc.problem})")]
    except KVShareError as exc:
        return [found("break-even.unknown", problem=first_line(exc))]
    if said is None:
        problem = f"{url} does not say; is that a KVShare server of this version?"
        return [found("break-even.unknown", problem=problem)]
    if said.missing:
        unmeasured = found("break-even.unmeasured", url=url, missing=" and ".join(said.missing))
        return [found("costs.assumed", origin=said.origin, rates=said.rates, url=url), unmeasured]
    measured = found("costs.measured", origin=said.origin, rates=said.rates, url=url)
    pays = found("break-even.known" if said.ever_pays else "break-even.never", said=said.break_even, url=url)
    return [measured, pays, *_check_disk_rate(costs, url)]


def _check_disk_rate(costs: object, url: str) -> list[Check]:
    """Check whether KV on disk pays, by what was measured; nothing for a server without a disk tier."""
    try:
        num_tokens = disk_break_even(costs)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return []
    if num_tokens is None:
        return [found("disk.slow", url=url)]
    return [found("disk.pays", num_tokens=num_tokens, url=url)]
