"""
The format of a stored segment: one immutable file that describes itself.

    8 bytes           length of the header, little-endian
    header            JSON, padded with blanks: the planes begin at a multiple of 4096 bytes
    planes in order   [layer][token][head][dim], in the model's own dtype

This is a valid safetensors file, with a tensor for each plane; what only KVShare needs is in its
`__metadata__`. Each layer of each plane has its own check (xxh3), so that a range of layers can be read and
checked without the others. The header has a check, too (SHA-256).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from delta_tree import Segment
from kvshare.tiers.files import Files
from kvshare.tiers.pace import CHUNK_BYTES, BytesRead

if TYPE_CHECKING:
    from kvshare.kv.layout import KVLayout  # imports torch

Rows = NDArray[np.uint8]
"""The bytes of one plane: (L, bytes of a layer)."""

FORMAT: Final = "kvshare segment 1"
PAGE_BYTES: Final = 4096
MOST_HEADER_BYTES: Final = 64 * PAGE_BYTES
_DTYPES: Final = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint8": "U8",
}


class ObjectError(Exception):
    """A file is not the object it should be: cut off, changed, or of another segment or model."""


@dataclass(frozen=True, slots=True)
class StoredPlane:
    """One plane of an object, as safetensors describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # (L, T, H, D), or (H * L, 2, T, D) where heads come first
    start: int  # of its bytes, counted from the end of the header
    end: int

    @property
    def layer_bytes(self) -> int:
        return (self.end - self.start) // max(1, self.shape[0])


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """What all objects of a folder have in common: the fingerprint, and the layout of the model's KV."""

    fingerprint: str
    layout: KVLayout

    @classmethod
    def of(cls, layout: KVLayout, parts: Sequence[str]) -> Self:
        """Hash the layout, and `parts`: everything else on which it depends whether stored KV may be used."""
        digest = hashlib.sha256()
        for part in (FORMAT, str(layout), layout.digest, str(layout.dtype), *parts):
            digest.update(f"{len(part)}:{part}".encode())
        return cls(digest.hexdigest(), layout)

    def planes(self, num_tokens: int) -> tuple[StoredPlane, ...]:
        """Return the planes of a segment of this length, in the order of their bytes."""
        start, planes = 0, []
        dtype = _DTYPES[str(self.layout.dtype).removeprefix("torch.")]
        for name, shape in self._shapes(num_tokens):
            end = start + self.layout.dtype.itemsize * int(np.prod(shape))
            planes.append(StoredPlane(name, dtype, shape, start, end))
            start = end
        return tuple(planes)

    def _shapes(self, num_tokens: int) -> list[tuple[str, tuple[int, ...]]]:
        planes = enumerate(self.layout.planes)
        return [(f"{plane.name}.{number}", plane.shape(num_tokens)) for number, plane in planes]


@dataclass(frozen=True, slots=True)
class HeadsFirstForm(ObjectForm):
    """
    One plane in the order of the arena of vLLM's workers: each of its "layers" is one layer of one head.

        [head][layer]   [k, v][token][dim]
    """

    def _shapes(self, num_tokens: int) -> list[tuple[str, tuple[int, ...]]]:
        keys, _ = self.layout.planes
        return [("kv.0", (keys.num_heads * self.layout.num_layers, 2, num_tokens, keys.dim))]


@dataclass(frozen=True, slots=True)
class Header:
    """The description of an object, with which its file begins."""

    segment: Segment
    fingerprint: str
    planes: tuple[StoredPlane, ...]
    checks: tuple[tuple[int, ...], ...]  # by plane and layer
    num_bytes: int = 0  # of the header itself

    def to_bytes(self) -> bytes:
        """Write the header with its length in front, padded to whole pages."""
        document = self._document()
        document["__metadata__"]["check"] = _check_of(document)
        text = json.dumps(document, separators=(",", ":")).encode()
        return_bytes = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES
        return (return_bytes - 8).to_bytes(8, "little") + text.ljust(return_bytes - 8)

    def _document(self) -> dict[str, Any]:
        segment = {name: str(value) for name, value in asdict(self.segment).items()}
        checks = " ".join(",".join(f"{check:016x}" for check in of_plane) for of_plane in self.checks)
        metadata = {"format": FORMAT, "fingerprint": self.fingerprint, "checks": checks, **segment}
        tensors = {
            plane.name: {
                "dtype": plane.dtype,
                "shape": list(plane.shape),
                "data_offsets": [plane.start, plane.end],
            }
            for plane in self.planes
        }
        return {"__metadata__": metadata, **tensors}

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Read a header. Raises ObjectError for bytes that `to_bytes` did not write."""
        try:
            document = json.loads(raw[8:])
            metadata = document.pop("__metadata__")
            expected = metadata.pop("check")
            if metadata.pop("format") != FORMAT:
                raise ObjectError("it has another format")
            tensors = document.items()
            header = cls(
                segment=_segment_of(metadata),
                fingerprint=metadata["fingerprint"],
                planes=tuple(
                    StoredPlane(name, one["dtype"], tuple(one["shape"]), *one["data_offsets"])
                    for name, one in tensors
                ),
                checks=tuple(
                    tuple(int(check, 16) for check in of_plane.split(","))
                    for of_plane in metadata["checks"].split(" ")
                ),
                num_bytes=len(raw),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ObjectError("its header cannot be read") from exc
        if _check_of(header._document()) != expected:
            raise ObjectError("its header does not match its check")
        return header


def checks_of(rows: Sequence[Rows]) -> tuple[tuple[int, ...], ...]:
    """Compute the checks, by plane and layer."""
    return tuple(tuple(xxhash.xxh3_64_intdigest(layer.data) for layer in plane) for plane in rows)


def write_object(files: Files, path: Path, header: Header, rows: Sequence[Rows]) -> int:
    """
    Write a whole file and wait until the device has it. Returns its bytes.

    Shapes:  rows: one C-contiguous (L, bytes of a layer) for each plane
    Raises:  OSError; then a part of the file may be there
    """
    descriptor, num_bytes = files.create(path), 0
    try:
        for part in (memoryview(header.to_bytes()), *(plane.data.cast("B") for plane in rows)):
            written = 0
            while written < len(part):
                written += files.write(descriptor, part[written:])
            num_bytes += len(part)
        files.sync(descriptor)
    finally:
        files.close(descriptor)
    return num_bytes


class StoredObject:
    """
    An object that is open for reading, until `close`. Reads whole layers, and checks them.

    Raises:  ObjectError for a file that is no object; OSError
    """

    def __init__(
        self, files: Files, path: Path, progress: BytesRead | None = None, *, counts_header: bool = True
    ) -> None:
        """`progress`: what is read is added; the header, which tells no pace of much more, if it counts."""
        self._files = files
        self._progress = progress if progress is not None and counts_header else BytesRead()
        self._descriptor = files.open(path)
        try:
            length = int.from_bytes(self._read(0, 8), "little")
            if not 0 < length < MOST_HEADER_BYTES or (8 + length) % PAGE_BYTES:
                raise ObjectError("it does not begin with a header")
            self.header = Header.from_bytes(self._read(0, 8 + length).tobytes())
            self._progress = progress or self._progress
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._files.close(self._descriptor)

    def rows(self, plane: int, first: int = 0, last: int | None = None) -> Rows:
        """Read the layers [first, last) of a plane, by default all: (last - first, bytes of a layer)."""
        described, checks = self.header.planes[plane], self.header.checks[plane]
        last = described.shape[0] if last is None else last
        start = self.header.num_bytes + described.start + first * described.layer_bytes
        data = self._read(start, (last - first) * described.layer_bytes).reshape(last - first, -1)
        if checks_of([data]) != (checks[first:last],):
            raise ObjectError("its bytes do not match their checks")
        return data

    def _read(self, start: int, num_bytes: int) -> Rows:
        data = np.empty(num_bytes, dtype=np.uint8)
        into, done = data.data, 0
        while done < num_bytes:
            count = self._files.read(self._descriptor, into[done : done + CHUNK_BYTES], start + done)
            if not count:
                raise ObjectError(f"it ends {num_bytes - done} bytes too early")
            done += count
            self._progress.add(count)
        return data


def verify(files: Files, path: Path) -> Header:
    """Read a whole object, and compare it with its checks. Raises ObjectError, OSError."""
    with closing(StoredObject(files, path)) as stored:
        for number in range(len(stored.header.planes)):
            stored.rows(number)
        return stored.header


def claimed(files: Files, path: Path) -> tuple[Segment, str]:
    """
    Return the segment that a file claims to hold, and the fingerprint, both unchecked. This is several times
    as fast as reading and checking a header, which counts if there are 100,000.

    Raises:  ObjectError, OSError
    """
    descriptor, page = files.open(path), memoryview(bytearray(PAGE_BYTES))
    try:
        num_read = files.read(descriptor, page, 0)
        length = int.from_bytes(page[:8], "little")
        if num_read < PAGE_BYTES or not 0 < length < MOST_HEADER_BYTES:
            raise ObjectError("it does not begin with a header")
        raw = bytes(page[8:])
        while len(raw) < length and num_read:
            num_read = files.read(descriptor, page, 8 + len(raw))
            raw += page[:num_read]
        own = json.loads(raw[:length])["__metadata__"]
        return _segment_of(own), str(own["fingerprint"])
    except (ValueError, KeyError, TypeError) as exc:
        raise ObjectError("its header cannot be read") from exc
    finally:
        files.close(descriptor)


def _segment_of(metadata: dict[str, str]) -> Segment:
    values = {field.name: metadata[field.name] for field in fields(Segment)}
    namespace = values.pop("namespace")
    return Segment(namespace=namespace, **{name: int(value) for name, value in values.items()})  # type: ignore[arg-type]  # ids are integers


def _check_of(document: dict[str, Any]) -> str:
    own = {name: value for name, value in document["__metadata__"].items() if name != "check"}
    text = json.dumps({**document, "__metadata__": own}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
