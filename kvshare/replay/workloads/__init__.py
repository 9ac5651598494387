"""
Streams for which sharing pays, made from real text with a seed: `kvshare workload NAME`.

    template   forms with slots in the middle, filled with different values
    header     date, user name and tool list on top of a long shared system prompt
    window     long chats whose oldest turns are dropped from the front
    resubmit   an earlier turn edited and sent again
    rag        documents of question sets, retrieved in another order and with other documents
    agent      growing tool transcripts, run again with changed results
    revise     a text that is changed in one place and asked about again, forty times

Each takes text from the user's files, or from a small sample in samples/ that was written for this purpose.
Equal files, number of requests and seed give equal rows.
"""

from kvshare.replay.workloads.generate import WORKLOADS, generate, write_rows
from kvshare.replay.workloads.sources import WorkloadRow

__all__ = ["WORKLOADS", "WorkloadRow", "generate", "write_rows"]
