"""A document of `kvshare replay --tier` whose figures are as long as they get."""

_TIER = {"max_bytes": 2**45, "peak_bytes": 2**45, "hit_tokens": 123_456_789, "exact_tokens": 123_456_789}
TIERS = {
    "data": {
        "num_requests": 123_456,
        "num_tokens": 1_234_567_890,
        "unreadable": {"num_rows": 0, "lines": []},
    },
    "unlimited": [
        {
            "arm": "kvshare-fingerprints-open",
            "num_bytes": 123_456_789_012_345,
            "exact_tokens": 1_234_567_890,
            "approximate_tokens": 123_456_789,
        }
    ],
    "stacks": [
        {
            "arm": "kvshare-fingerprints-open",
            "eviction": eviction,
            **dict.fromkeys(("exact_share", "exact_share_of_host", "hit_share"), 1.0),
            "host": _TIER,
            "disk": disk,
            "evictions": {"whole": 123_456, "end": 123_456},
            "num_not_stored": 12_345,
        }
        for eviction, disk in (
            ("s3-fifo", {**_TIER, "bytes_written": 2**47, "bytes_read": 2**47}),
            ("copies", None),
        )
    ],
}
