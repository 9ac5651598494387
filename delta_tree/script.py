"""
Edit scripts: how one prompt's tokens become another's.

A script is a value. It is held in its serialised form, a few hundred bytes for a typical edit, and
decoded when somebody looks: a tree of thousands of nodes keeps thousands of them in memory. How a
good script is found is align.py's business.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from delta_tree.edits import Edit, Match, Op
from delta_tree.errors import EditRangeError, InvalidTokensError
from delta_tree.spans import Span, TokenIds, token_ids, tokens_from_bytes

# Layout, little endian: header, one op byte per edit, (source, target) length pairs as int32,
# then the tokens of all inserts and replaces in order as int32.
_HEADER = struct.Struct("<4sIIII")  # magic, version, source length, edits, tokens
_MAGIC = b"KVES"
_VERSION = 1


_OPS = (Op.KEEP, Op.INSERT, Op.REPLACE, Op.DELETE)
_CODE_OF = {op: code for code, op in enumerate(_OPS)}
_KEEP = _CODE_OF[Op.KEEP]


class EditScript:
    """
    Edits that consume a source of `source_length` tokens from left to right, without a hole.

    Immutable, comparable, hashable. Two scripts are equal when their edits are.
    """

    __slots__ = ("_payload",)
    _payload: bytes

    def __init__(self, source_length: int, edits: Iterable[Edit]) -> None:
        """
        Raises:  EditRangeError if the edits do not cover the source and their target in order
        """
        edits = tuple(edits)
        at_source = at_target = 0
        for edit in edits:
            if (edit.source.start, edit.target.start) != (at_source, at_target):
                raise EditRangeError(
                    f"edit at source {edit.source.start}, target {edit.target.start}; "
                    f"expected {at_source} and {at_target}"
                )
            at_source, at_target = edit.source.end, edit.target.end
        if at_source != source_length:
            raise EditRangeError(f"edits cover {at_source} of {source_length} source tokens")
        self._payload = _encode(
            source_length,
            [_CODE_OF[edit.op] for edit in edits],
            [(len(edit.source), len(edit.target)) for edit in edits],
            token_ids([token for edit in edits for token in edit.tokens]),
        )

    @classmethod
    def from_keeps(cls, source_length: int, target: TokenIds, keeps: Sequence[Match]) -> "EditScript":
        """
        The script that keeps `keeps` and replaces, inserts or deletes whatever lies between.

        Raises:  EditRangeError if the keeps overlap, run backwards or reach past an end
        """
        codes: list[int] = []
        lengths: list[tuple[int, int]] = []
        fresh: list[TokenIds] = []
        at_source = at_target = 0
        for keep in (*keeps, Match(source_length, len(target), 0)):
            removed, added = keep.source - at_source, keep.target - at_target
            if removed < 0 or added < 0:
                raise EditRangeError("keeps must be in order, inside both prompts, and apart")
            if removed or added:
                op = Op.INSERT if not removed else Op.REPLACE if added else Op.DELETE
                codes.append(_CODE_OF[op])
                lengths.append((removed, added))
                fresh.append(target[at_target : keep.target])
            if keep.length:
                codes.append(_KEEP)
                lengths.append((keep.length, keep.length))
            at_source, at_target = keep.source + keep.length, keep.target + keep.length
        tokens = np.concatenate(fresh) if fresh else target[:0]
        return cls._of(_encode(source_length, codes, lengths, tokens))

    @classmethod
    def from_bytes(cls, blob: bytes) -> "EditScript":
        """
        A script from its `to_bytes`.

        Raises:  EditRangeError if the bytes are not a whole and consistent script
        """
        script = cls._of(bytes(blob))
        try:
            script._check()
        except (struct.error, InvalidTokensError, ValueError) as exc:
            raise EditRangeError(f"not an edit script: {exc}") from exc
        return script

    def to_bytes(self) -> bytes:
        """A compact, versioned form without pickle; `from_bytes` is its inverse."""
        return self._payload

    @property
    def source_length(self) -> int:
        """Tokens the script consumes."""
        return self._header()[0]

    @property
    def target_length(self) -> int:
        """Tokens the script produces."""
        return int(self._lengths()[:, 1].sum())

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits in order, decoded on each call."""
        edits: list[Edit] = []
        tokens = self._tokens().tolist()
        at_source = at_target = at_token = 0
        for code, (removed, added) in zip(self._codes(), self._lengths().tolist(), strict=True):
            op = _OPS[code]
            num_new = 0 if op is Op.KEEP else added
            edits.append(
                Edit(
                    op,
                    Span(at_source, at_source + removed),
                    Span(at_target, at_target + added),
                    tuple(tokens[at_token : at_token + num_new]),
                )
            )
            at_source, at_target = at_source + removed, at_target + added
            at_token += num_new
        return tuple(edits)

    @property
    def keeps(self) -> tuple[Match, ...]:
        """The kept stretches in order."""
        lengths = self._lengths()
        starts = np.vstack([np.zeros((1, 2), np.int64), np.cumsum(lengths, axis=0)]).tolist()
        return tuple(
            Match(source, target, length)
            for code, (source, target), (length, _) in zip(
                self._codes(), starts[:-1], lengths.tolist(), strict=True
            )
            if code == _KEEP
        )

    @property
    def num_kept(self) -> int:
        """Tokens taken over from the source."""
        return self.target_length - len(self._tokens())

    def apply(self, source: TokenIds) -> TokenIds:
        """
        The target's tokens.

        Raises:  EditRangeError if `source` has another length than the script was made for
        """
        if len(source) != self.source_length:
            raise EditRangeError(f"the script is for {self.source_length} source tokens, got {len(source)}")
        origin, fresh = self._origin()
        if not len(source):
            return token_ids(fresh)
        return token_ids(np.where(origin >= 0, source[origin], fresh))

    def compose(self, then: "EditScript") -> "EditScript":
        """
        One script for this one followed by `then`; what both keep is kept.

        Raises:  EditRangeError if `then` does not start from this script's target
        """
        if then.source_length != self.target_length:
            raise EditRangeError(
                f"the first script makes {self.target_length} tokens, "
                f"the second starts from {then.source_length}"
            )
        origin, fresh = self._origin()
        then_origin, target = then._origin()
        carried = then_origin >= 0
        target[carried] = fresh[then_origin[carried]]
        through = np.full(len(then_origin), -1, dtype=np.int64)
        through[carried] = origin[then_origin[carried]]
        # `target` is right only where a token is new; from_keeps reads no other place.
        return self.from_keeps(self.source_length, target, _increasing_runs(through))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EditScript) and self._payload == other._payload

    def __hash__(self) -> int:
        return hash(self._payload)

    def __repr__(self) -> str:
        # Counts only: token ids stay out of logs.
        return (
            f"EditScript({self.source_length} -> {self.target_length} tokens, "
            f"{self.num_kept} kept, {len(self._codes())} edits)"
        )

    @classmethod
    def _of(cls, payload: bytes) -> "EditScript":
        script = cls.__new__(cls)
        script._payload = payload
        return script

    def _header(self) -> tuple[int, int, int]:
        magic, version, source_length, num_edits, num_tokens = _HEADER.unpack_from(self._payload)
        if magic != _MAGIC or version != _VERSION:
            raise EditRangeError(f"not an edit script of version {_VERSION}")
        return source_length, num_edits, num_tokens

    def _codes(self) -> bytes:
        return self._payload[_HEADER.size : _HEADER.size + self._header()[1]]

    def _lengths(self) -> npt.NDArray[np.int64]:
        num_edits = self._header()[1]
        start = _HEADER.size + num_edits
        flat = np.frombuffer(self._payload, dtype="<i4", count=2 * num_edits, offset=start)
        return flat.reshape(-1, 2).astype(np.int64)

    def _tokens(self) -> TokenIds:
        _, num_edits, num_tokens = self._header()
        return tokens_from_bytes(self._payload[_HEADER.size + 9 * num_edits :][: 4 * num_tokens])

    def _origin(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Per target position: the source position it comes from or -1, and its new token or 0."""
        origin = np.full(self.target_length, -1, dtype=np.int64)
        for keep in self.keeps:
            kept = np.arange(keep.source, keep.source + keep.length)
            origin[keep.target : keep.target + keep.length] = kept
        fresh = np.zeros(self.target_length, dtype=np.int32)
        fresh[origin < 0] = self._tokens()
        return origin, fresh

    def _check(self) -> None:
        source_length, num_edits, num_tokens = self._header()
        expected = _HEADER.size + 9 * num_edits + 4 * num_tokens
        if len(self._payload) != expected:
            raise EditRangeError(f"{len(self._payload)} bytes, expected {expected}")
        lengths, codes = self._lengths(), self._codes()
        if (lengths < 0).any() or max(codes, default=0) >= len(_OPS):
            raise EditRangeError("an edit has a negative length or an unknown operation")
        new = sum(int(added) for code, (_, added) in zip(codes, lengths, strict=True) if code)
        if int(lengths[:, 0].sum()) != source_length or new != num_tokens:
            raise EditRangeError("edit lengths do not add up to the source and the new tokens")
        for edit in self.edits:
            assert edit.source or edit.target  # decoding runs each edit's own check


def _encode(
    source_length: int,
    codes: Sequence[int],
    lengths: Sequence[tuple[int, int]],
    tokens: npt.NDArray[np.int32],
) -> bytes:
    header = _HEADER.pack(_MAGIC, _VERSION, source_length, len(codes), len(tokens))
    pairs = np.asarray(lengths, dtype="<i4").tobytes()
    return header + bytes(codes) + pairs + tokens.astype("<i4", copy=False).tobytes()


def _increasing_runs(origin: npt.NDArray[np.int64]) -> list[Match]:
    """The stretches of `origin` that count up by one from a position >= 0, as keeps."""
    positions = np.flatnonzero(origin >= 0)
    if not len(positions):
        return []
    sources = origin[positions]
    breaks = (np.diff(positions) != 1) | (np.diff(sources) != 1)
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(positions)]
    return [Match(int(sources[low]), int(positions[low]), high - low) for low, high in pairwise(edges)]
