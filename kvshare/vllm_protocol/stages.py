"""
Stages of a request in vLLM, as `FinishedReport.stage_seconds` names them: segments read from disk, verified
by the host, copied and written, rows copied from blocks, placeholders computed, KV saved. Of a pass that
began before its copies had arrived: how much of the copying went on during it, and how long it waited for
that.
"""

VERIFY, WRITE, BLOCKS, PASS, SAVE = "verify", "write", "blocks", "pass", "save"
HIDDEN, WAITED = "hidden", "waited"
DISK = "disk"
ALL = (DISK, VERIFY, WRITE, BLOCKS, PASS, SAVE, HIDDEN, WAITED)
