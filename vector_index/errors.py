"""
What can go wrong in the index, as one tree:

    VectorIndexError
    |-- IndexUnavailableError   the backend cannot answer: closed, unreachable, damaged, in use
    |   `-- IndexPausedError    it takes no writes for now; it resumes by itself
    |-- IndexSchemaError        the stored index was built with other settings; rebuild it
    `-- EmbedderError           the text embedder cannot be loaded or cannot embed

Exceptions of other libraries become one of these in the file that imports the library. None of them reaches a
request: the nominator turns them into `Failure` values.
"""


class VectorIndexError(Exception):
    """Root of everything this package raises on purpose."""


class IndexUnavailableError(VectorIndexError):
    """The backend cannot answer now; the index is rebuildable, so nothing is lost for good."""


class IndexPausedError(IndexUnavailableError):
    """The index is not written for now: the disk is nearly full, or the index is being optimised."""


class IndexSchemaError(VectorIndexError):
    """The stored index was built with other settings than the ones asked for."""


class EmbedderError(VectorIndexError):
    """The text embedder cannot be loaded or cannot embed."""
