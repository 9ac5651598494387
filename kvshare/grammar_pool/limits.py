"""Limits on the cost of one grammar. A process keeps them itself; the server waits a little longer."""

COMPILE_S = 8.0  # of wall-clock time
MASK_S = 2.0  # of computing, to find which tokens may come next
MASK_WAIT_S = 20.0  # of wall-clock time, on a machine that is busy with something else
MEMORY_BYTES = 512 * 2**20  # of address space, beyond what the first process has
HELD_BYTES = 2**30  # of memory that the grammars of one key's answers hold together
MAX_CHARS = 131_072  # of a grammar; 2,000 optional properties of one object take 25,000 and half a second
