"""The limit on the connections and files that this process has open at once."""

import logging
import resource

log = logging.getLogger(__name__)

ENOUGH = 4096  # a stream before vLLM takes two sockets; the store, the index and libraries some hundred files


def raise_open_files() -> int:
    """
    Raise the soft limit of open files to the hard one, and warn where that is low. Returns the limit.

    The soft one is often 1024 for the sake of programs that call select(), which this is not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):  # macOS gives an endless hard limit that it does not take
            log.debug("the limit of open files stays at %d", soft)
    if soft != resource.RLIM_INFINITY and soft < ENOUGH:
        log.warning(
            "at most %d files and connections may be open at once, expected %d: clients beyond that wait; "
            "raise it with `ulimit -Hn` or LimitNOFILE=",
            soft,
            ENOUGH,
        )
    return soft
