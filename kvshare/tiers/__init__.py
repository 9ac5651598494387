"""
KV that outlives memory and the process: tiers below host memory, behind the interface of `kvshare.kv.tier`.

    files.py         what the disk is asked for; where tests put faults
    kv_object.py     the format: one segment as one immutable, self-describing file with checks
    disk_tier.py     objects in one folder, within a budget
    write_behind.py  a thread that writes what requests have stored, next to them and with bounded bandwidth
    inspection.py    what administrators may know of the files of a store
    tier_stack.py    memory above the disk: what is asked for often is in memory

An object is written before anything refers to its file, and is deleted after everything that does. A prompt
counts after a start only where both are there, its row in the tree and all its objects.
"""

from typing import Final

KV_FOLDER: Final = "kv"
"""Of the objects, in the folder of the store."""
