"""The sections of config.yaml as one frozen `Settings` tree, with what each value may be."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from kvshare.settings.auth import AuthSettings
from kvshare.settings.patterns import checked_pattern
from kvshare.settings.section import Bytes, Mode, PositiveBytes, Section, size_of
from kvshare.settings.shared_tier import SharedTierSettings


def _origin(origin: str) -> str:
    """Raises ValueError if no browser sends this text as an Origin."""
    parts = urlsplit(origin)
    is_origin = parts.scheme and parts.netloc and f"{parts.scheme}://{parts.netloc}".lower() == origin
    if origin != "*" and not is_origin:
        raise ValueError("expected an origin like https://app.example or http://localhost:3000, or '*'")
    return origin


class ServerSettings(Section):
    host: str
    port: int = Field(ge=0, le=65535)
    max_body_bytes: PositiveBytes
    keep_alive_s: PositiveFloat
    drain_s: NonNegativeFloat
    admin_port: int | None = Field(ge=0, le=65535)
    cors_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = Field(strict=False)


class ModelSettings(Section):
    path: str | None
    served_name: str | None
    device: str
    dtype: Literal["auto", "float32", "bfloat16"]
    max_model_len: PositiveInt | None


class EngineSettings(Section):
    kind: Literal["embedded", "vllm"]
    max_running: PositiveInt
    max_waiting: NonNegativeInt
    prefill_chunk_tokens: PositiveInt
    num_threads: PositiveInt | None


def _base_url(url: str) -> str:
    """Return the address without a trailing slash. Raises ValueError that says what is wrong."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected an address like http://host:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("expected an address without user, query or fragment")
    parts.port  # noqa: B018  raises ValueError for a port that is none
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise ValueError("expected the server's address without /v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


_BaseUrl = Annotated[str, AfterValidator(_base_url)]


def _further(url: str, ports: int) -> str:
    """Return the address with a port number that is higher by `ports`."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{port + ports}"


class ReplicaSettings(Section):
    """One `vllm serve`. `control_url` is the connector's; by default the next port of the same host."""

    url: _BaseUrl
    control_url: _BaseUrl | None = None
    name: str | None = Field(default=None, min_length=1)
    data_parallel_size: int = Field(default=1, ge=1)

    @property
    def control(self) -> str:
        """Return the address of the connector's control server; of the first rank if there are several."""
        return self.control_url if self.control_url is not None else _further(self.url, 1)

    @property
    def ranks(self) -> tuple[ReplicaSettings, ...]:
        """
        Return each data-parallel rank as a replica, as KV cannot move between ranks. The ports of their
        control servers count up.
        """
        if self.data_parallel_size == 1:
            return (self,)
        return tuple(
            ReplicaSettings(
                url=self.url, control_url=_further(self.control, rank), name=f"{self.label}-dp{rank}"
            )
            for rank in range(self.data_parallel_size)
        )

    @property
    def label(self) -> str:
        return self.name or urlsplit(self.url).netloc


class VllmSettings(Section):
    replicas: tuple[ReplicaSettings, ...] = Field(strict=False)
    connect_timeout_s: PositiveFloat
    read_timeout_s: PositiveFloat
    control_timeout_s: PositiveFloat
    journal_wait_s: PositiveFloat
    health_interval_s: PositiveFloat
    lost_after_s: PositiveFloat
    ticket_expiry_s: PositiveFloat
    max_inflight: PositiveInt
    max_imbalance: PositiveInt


class StoreSettings(Section):
    path: str | None
    kv_bytes: Bytes
    disk_bytes: Bytes | None
    disk_write_bytes_per_s: PositiveBytes
    disk_keep_free_bytes: Bytes
    eviction: Literal["adaptive", "copies", "lru", "s3-fifo", "worth"]
    # An empty index takes 3 MB, one write up to 1 MB.
    min_free_bytes: Annotated[int, Field(ge=8 * 2**20), size_of(Annotated[int, Field(ge=8 * 2**20)])]

    @model_validator(mode="after")
    def _check_disk(self) -> Self:
        if self.disk_bytes and self.disk_bytes < self.kv_bytes:
            raise ValueError(
                "expected disk_bytes of 0, null, or at least kv_bytes: what is in memory is on disk, too"
            )
        return self

    @property
    def max_disk_bytes(self) -> int:
        """Return the limit of KV on disk; 0: KV is in memory only."""
        return 2 * self.kv_bytes if self.disk_bytes is None else self.disk_bytes


class SharingSettings(Section):
    mode: Mode
    max_mode: Mode
    min_prompt_tokens: PositiveInt
    min_run: PositiveInt
    max_donors: PositiveInt
    max_deviation: float = Field(ge=0, allow_inf_nan=False)
    max_risk: float = Field(gt=0, le=1)
    calibration: str | None


class RepairSettings(Section):
    rule: Literal["auto", "windows", "attention"]
    edit_window: NonNegativeInt
    relocated_head: NonNegativeInt
    tail: PositiveInt
    max_budget: float = Field(ge=0, le=1)


class CostSettings(Section):
    prior_prefill_tokens_per_s: PositiveFloat
    prior_load_bytes_per_s: Annotated[PositiveFloat, size_of(PositiveFloat)]
    learn: bool
    measure_at_start: bool
    min_saved_s: float
    min_saved_fraction: float = Field(ge=0, lt=1)


class ControlSettings(Section):
    unshared_share: float = Field(ge=0, le=1)
    shadow_share: float = Field(ge=0, le=1)
    first_requests: NonNegativeInt
    confidence: float = Field(gt=0, lt=1)
    block_s: PositiveFloat


class IndexSettings(Section):
    backend: Literal["edge", "server", "memory"]
    url: str | None
    collection: str = Field(min_length=1)
    kgram: PositiveInt
    window: PositiveInt
    block_size: PositiveInt
    max_candidates: PositiveInt
    search_timeout_s: PositiveFloat
    dense: bool
    dense_min_tokens: NonNegativeInt
    dense_max_share: PositiveFloat | None
    dense_min_uncovered: float = Field(ge=0, le=1)
    max_distance: float = Field(ge=0, le=2)
    embedder: str | None
    embed_timeout_s: PositiveFloat


class RuleSettings(Section):
    """One rule that rewrites prompts, see `kvshare.rules`. Rules are applied in the listed order."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")  # shown in headers, metrics and logs
    match: Annotated[str, AfterValidator(checked_pattern)]
    roles: tuple[Literal["system", "user", "tool"], ...] = Field(
        default=("system", "user"), alias="in", strict=False, min_length=1
    )
    action: Literal["pin", "move"]
    value: str = Field(default="", pattern=r"^[^\r\n]*$")  # of pin: the text that replaces what matches
    first: bool = False  # apply to the first matching line only

    @model_validator(mode="after")
    def _check_value(self) -> Self:
        if self.action == "move" and self.value:
            raise ValueError("expected no 'value' with the action move, which changes no text")
        return self


def _with_different_names(rules: tuple[RuleSettings, ...]) -> tuple[RuleSettings, ...]:
    """Raises ValueError where two rules have one name."""
    names = [rule.name for rule in rules]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"expected different names, two rules are called {twice[0]}")
    return rules


class LoggingSettings(Section):
    level: Literal["debug", "info", "warning", "error"]
    json_lines: bool = Field(alias="json")


class TracingSettings(Section):
    endpoint: Annotated[str, AfterValidator(_base_url)] | None
    sample_share: float = Field(ge=0, le=1)


class Settings(Section):
    """Every setting. The defaults are in config.yaml, next to this file or at the repository's root."""

    server: ServerSettings
    auth: AuthSettings
    model: ModelSettings
    engine: EngineSettings
    vllm: VllmSettings
    store: StoreSettings
    shared_tier: SharedTierSettings
    sharing: SharingSettings
    repair: RepairSettings
    cost: CostSettings
    control: ControlSettings
    index: IndexSettings
    rules: Annotated[tuple[RuleSettings, ...], AfterValidator(_with_different_names)] = Field(strict=False)
    logging: LoggingSettings
    tracing: TracingSettings
