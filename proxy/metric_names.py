"""Each Prometheus metric: its name, text, labels, and of a histogram the edges of its buckets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, eq=False)
class _Row:
    metric: str  # its name
    text: str
    labels: tuple[str, ...] = ()
    edges: tuple[float, ...] = ()


class RequestCounter(_Row, Enum):
    """Each request adds to these."""

    REQUESTS = (
        "kvshare_requests",
        "Requests answered; status 499: the client went away.",
        ("endpoint", "status", "finish_reason"),
    )
    REFUSALS = "kvshare_refusals", "Requests answered with an error of this server, by its code.", ("code",)
    PROMPT_TOKENS_BY_SOURCE = (
        "kvshare_prompt_tokens_by_source",
        "Prompt tokens by where their KV came from.",
        ("source",),
    )
    LOOKUP_REQUESTS = (
        "kvshare_lookup_requests",
        "Prompts by what sharing found for them, and why not more.",
        ("result", "reason"),
    )
    LOOKUP_TOKENS_REQUESTED = "kvshare_lookup_tokens_requested", "Prompt tokens that were looked up."
    LOOKUP_TOKENS_HIT = "kvshare_lookup_tokens_hit", "Prompt tokens that were found and reused."
    TENANT_REQUESTS = (
        "kvshare_tenant_requests",
        "Requests of the first 50 tenants, and of all others.",
        ("tenant", "outcome"),
    )
    TENANT_PROMPT_TOKENS = (
        "kvshare_tenant_prompt_tokens",
        "Prompt tokens of a tenant by where their KV came from.",
        ("tenant", "source"),
    )
    RULES_APPLIED = "kvshare_rules_applied", "Requests that a rule rewrote.", ("rule",)


class RequestHistogram(_Row, Enum):
    """Each request adds to these. Edges are vLLM's where it has the same histogram: panels overlay both."""

    REQUEST_DURATION_SECONDS = (
        "kvshare_request_duration_seconds",
        "From the request's headers to the last byte, generating routes.",
        ("endpoint",),
        (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480),
    )
    TIME_TO_FIRST_TOKEN_SECONDS = (
        "kvshare_time_to_first_token_seconds",
        "From the request's headers to its first token.",
        (),
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40),
    )
    INTER_TOKEN_LATENCY_SECONDS = (
        "kvshare_inter_token_latency_seconds",
        "Between tokens of one choice.",
        (),
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    )
    STAGE_DURATION_SECONDS = (
        "kvshare_stage_duration_seconds",
        "Time per stage of a request.",
        ("stage",),
        (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    )
    RECOMPUTE_FRACTION = (
        "kvshare_recompute_fraction",
        "Share of a prompt that was computed.",
        (),
        (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1),
    )
    EXPECTED_DEVIATION_NATS = (
        "kvshare_expected_deviation_nats",
        "Expected KL of an answer from approximate KV, used or refused.",
        ("result", "repair"),
        (0.0001, 0.0003, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1),
    )


class EngineGauge(_Row, Enum):
    """The engine reports these when Prometheus asks."""

    MODEL_INFO = "kvshare_model_info", "1 for the model that is served.", ("model",)
    QUEUE_DEPTH = "kvshare_queue_depth", "Requests that wait for a slot."
    RUNNING_REQUESTS = "kvshare_running_requests", "Requests whose KV is on the device."
    TREE_NODES = "kvshare_tree_nodes", "Prompts in the tree."
    TREE_SEGMENTS = "kvshare_tree_segments", "KV segments in memory."
    TREE_DEPTH = "kvshare_tree_depth", "Longest chain of edits."
    TREE_BYTES = "kvshare_tree_bytes", "Bytes of KV in memory."
    TENANT_KV_BYTES = "kvshare_tenant_kv_bytes", "Bytes of KV of a tenant's prompts.", ("tenant",)
    TREE_BUDGET_BYTES = "kvshare_tree_budget_bytes", "Bytes of KV that may be in memory."
    TIER_SEGMENTS = "kvshare_tier_segments", "KV segments in a tier of the embedded engine.", ("tier",)
    TIER_BYTES = "kvshare_tier_bytes", "Bytes of those segments.", ("tier",)
    TIER_MAX_BYTES = "kvshare_tier_max_bytes", "Bytes of KV that may be in the tier.", ("tier",)
    TIER_DUE_BYTES = (
        "kvshare_tier_due_bytes",
        "Bytes of KV in memory that are not written to this tier yet.",
        ("tier",),
    )
    TIER_PAUSED = "kvshare_tier_paused", "1 while nothing can be written to the tier.", ("tier",)
    EMBEDDING_BACKLOG = "kvshare_embedding_backlog", "Stored prompts that wait to be embedded."
    INDEX_PAUSED = "kvshare_index_paused", "1 while the index is not written."
    INDEX_WAITING_PROMPTS = "kvshare_index_waiting_prompts", "Prompts that a paused index misses."
    INDEX_DISK_FREE_BYTES = "kvshare_index_disk_free_bytes", "Free bytes on the index's disk."
    STORE_DISK_BYTES = "kvshare_store_disk_bytes", "Bytes on disk of metadata and index."
    PART_STATE = (
        "kvshare_part_state",
        "1 for the state of each part: ok, reduced, off. Of replicas the worst.",
        ("part", "state"),
    )
    CIRCUIT_STATE = (
        "kvshare_circuit_state",
        "1 for the state of each circuit breaker.",
        ("component", "state"),
    )
    CONTROL_RUNG = (
        "kvshare_control_rung",
        "How much less is shared at this load than could be; 0: all, 5: nothing.",
        ("load",),
    )
    CONTROL_SLOWDOWN_RATIO = (
        "kvshare_control_slowdown_ratio",
        "By what share requests take longer with more sharing; negative: it saves.",
        ("load",),
    )
    REPLICA_UP = "kvshare_replica_up", "Whether the replica takes requests.", ("replica",)
    REPLICA_SHARING = (
        "kvshare_replica_sharing",
        "Whether its connector is connected and shares.",
        ("replica",),
    )
    REPLICA_INFLIGHT = "kvshare_replica_inflight", "Requests being answered by the replica.", ("replica",)
    REPLICA_SEGMENTS = "kvshare_replica_segments", "KV segments that the replica holds.", ("replica",)
    REPLICA_KV_BYTES = "kvshare_replica_kv_bytes", "Bytes of those segments.", ("replica",)


class EngineCounter(_Row, Enum):
    """The engine has counted these since its start."""

    GENERATED_TOKENS = "kvshare_generated_tokens", "Tokens of answers."
    ISOLATION_DENIALS = "kvshare_isolation_denials", "Candidates of another namespace, dropped; alert on any."
    FALLBACK = "kvshare_fallback", "Requests served without a part that failed.", ("component", "reason")
    EVICTIONS = "kvshare_evictions", "Prompts evicted from the tree.", ("reason",)
    TENANT_EVICTIONS = (
        "kvshare_tenant_evictions",
        "Prompts of a tenant evicted, whole or their end, as it has reached its max_kv_bytes.",
        ("tenant",),
    )
    PLANS_EXECUTED = (
        "kvshare_plans_executed",
        "Planned requests by what vLLM made of them.",
        ("planned", "executed", "reason"),
    )
    VLLM_STAGE_SECONDS = (
        "kvshare_vllm_stage_seconds",
        "Seconds of stages in vLLM that requests with a ticket had.",
        ("stage",),
    )
    SPECULATIVE_STEPS = (
        "kvshare_speculative_steps",
        "Steps after the first token of answers with drafts, by what vLLM made of their plans.",
        ("executed",),
    )
    SPECULATIVE_TOKENS = (
        "kvshare_speculative_tokens",
        "Tokens that these steps gave, accepted ones and the one that each step adds.",
        ("executed",),
    )
    CONTROL_REQUESTS = "kvshare_control_requests", "Requests by how the controller served them.", ("arm",)
    SHADOW_ANSWERS = (
        "kvshare_shadow_answers",
        "Approximate answers that were computed once more in full: within their limit, or above it.",
        ("result",),
    )
    SHADOW_DEVIATION_NATS = (
        "kvshare_shadow_deviation_nats",
        "Sum of the deviations of these answers, as measured and as expected.",
        ("kind",),
    )
    CONTROL_CHANGES = (
        "kvshare_control_changes",
        "How often less or more was shared from then on.",
        ("direction",),
    )
    TIER_READS = (
        "kvshare_tier_reads",
        "Segments that plans asked a tier for, by what became of them: hit, miss, late, dropped.",
        ("tier", "result"),
    )
    ENGINE_EVENTS = "kvshare_engine_events", "What else the engine counts.", ("event",)
