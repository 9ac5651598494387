"""
Stages of a request in vLLM, as `FinishedReport.stage_seconds` names them: segments read from disk, verified
by the host, copied and written, rows copied from blocks, placeholders computed, KV saved. Of a pass that
began before its copies had arrived: how much of the copying went on during it, and how long it waited for
that. Of passes over what comes before the first copy, while a disk is read: what they took, which is in
`pass`, too.
"""

VERIFY, WRITE, BLOCKS, PASS, SAVE = "verify", "write", "blocks", "pass", "save"
HIDDEN, WAITED = "hidden", "waited"
DISK, AHEAD = "disk", "ahead"
ALL = (DISK, VERIFY, WRITE, BLOCKS, PASS, SAVE, HIDDEN, WAITED, AHEAD)
