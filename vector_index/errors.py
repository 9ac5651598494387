"""
What can go wrong in the index, as one tree:

    VectorIndexError
    |-- IndexUnavailableError   the backend cannot answer: closed, unreachable, damaged, in use
    |   `-- IndexPausedError    it takes no writes for now; it resumes by itself
    |-- IndexSchemaError        the stored index was built with other settings; rebuild it
    `-- EmbedderError           the text embedder cannot be loaded or cannot embed

Exceptions of other libraries become one of these in the file that imports the library. The nominator turns
them into `Failure` values, so that they end no generating request; /v1/embeddings reports them.
"""

from collections.abc import Iterator
from contextlib import contextmanager


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


@contextmanager
def backend_errors(backend: str, what: str, *, hint: str = "") -> Iterator[None]:
    """Turn what a backend raises (an Exception, or for a Rust panic a BaseException) into our error."""
    try:
        yield
    except VectorIndexError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise IndexUnavailableError(f"{backend} could not {what}: {why}{hint}") from error
