"""
KV that outlives memory and the process: tiers below host memory, with the interface of `kvshare.kv.tier`.

    lower_tier.py    what memory asks of a tier below it
    files.py         what the disk is asked for; where tests put faults
    kv_object.py     the format: one segment as one immutable, self-describing file with checks
    object_index.py  what the objects of a folder say of themselves, for a start of vLLM
    object_files.py  how their files are named
    disk_tier.py     objects in one folder, within a budget
    write_problem.py why nothing is written now, once in the log
    write_behind.py  a thread that writes what requests have stored, with bounded bandwidth, while others run
    inspection.py    what administrators may know of the files of a store
    shared_tier.py   objects in a store that several servers use
    shared_prompts.py    which prompts lie in them, for the servers that join
    shared_segments.py   which segments lie in them, for vLLMs
    shared_backend.py    what such a store must do; a breaker for those that do not
    redis_backend.py     one of them: Valkey or Redis
    seal.py              encrypts what is written there, with the operator's key
    shared_start.py      opens what the settings name
    disk_and_shared.py   a disk with a shared store below it, as one tier
    readers.py       threads that read, some for each tier
    pace.py          gives reads up as soon as they go too slowly
    shares.py        what of the segments lies where
    tier_stack.py    memory above the others: what is asked for often is in memory
    near_memory.py   what is in memory, and what leaves it; replays have it, too

An object is written before anything refers to its file, and is deleted after everything that does. A prompt
counts after a start only where both are there, its row in the tree and all its objects.
"""

from typing import Final

KV_FOLDER: Final = "kv"
"""Of the embedded engine's objects, in the folder of the store."""

VLLM_KV_FOLDER: Final = "vllm-kv"
"""Of the objects of a vLLM, in the folder that it is given, which may be that of a store."""
