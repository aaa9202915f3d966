"""Training rows from tokenised documents: which pieces stand in which row, at which positions, and what is scored.

    a document of 2.4 rows    [BOS a a a a a a a | a a a a a a a a | a a a]     two whole rows and a tail
    a row of tails            [a a a | BOS b b b | BOS c]     positions 0 1 2 | 0 1 2 3 | 0 1     each sees itself alone
    what is scored            [- a a | -   b b b | -   c]     a piece's first token has nothing before it

A model reads the borders from the positions, which fall back to 0 (transformers does so where it is given no mask).
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from recipes.load import RecipeError

IGNORED = -100
"""The label of a token that is not scored."""
PADDING_POOL = -1


@runtime_checkable
class Documents(Protocol):
    """Tokenised documents of one source, without BOS and EOS."""

    @property
    def name(self) -> str:
        """What the source is called."""
        ...

    @property
    def lengths(self) -> Int64[ndarray, " documents"]:
        """Return the tokens of each document."""
        ...

    @property
    def data_hash(self) -> str:
        """A hash of every id."""
        ...

    def ids(self, number: int) -> Int64[ndarray, " tokens"]:
        """Return the ids of one document."""
        ...


class Piece(NamedTuple):
    """Tokens `start` to `stop` of a document of a pool, with BOS before and EOS behind or not."""

    pool: int
    document: int
    start: int
    stop: int
    bos: bool
    eos: bool

    @property
    def size(self) -> int:
        """Tokens in a row, BOS and EOS included."""
        return self.stop - self.start + self.bos + self.eos


class Row(NamedTuple):
    """One training row, all of shape (row_tokens,): ids, positions, and the ids again, IGNORED where none is scored."""

    ids: Int64[ndarray, " tokens"]
    positions: Int64[ndarray, " tokens"]
    labels: Int64[ndarray, " tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What rows look like.

    Attributes:
        row_tokens: of every row.
        bos, eos: ids of what a document, or each piece of it, begins and ends with; None for nothing.
        every_piece: put them around every piece, not around the document.
        min_tokens: shorter pieces are left out.
        whole_rows: take pieces of exactly a row alone.
    """

    row_tokens: int
    bos: int | None = None
    eos: int | None = None
    every_piece: bool = False
    min_tokens: int = 2
    whole_rows: bool = False

    @property
    def bookends(self) -> int:
        """The tokens that may stand around a piece."""
        return (self.bos is not None) + (self.eos is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Documents that are drawn from alike: a source, or its long or its other documents.

    Attributes:
        share: of the tokens that come from here.
        numbers: which of the documents.
    """

    documents: Documents
    share: float
    numbers: Sequence[int]


def pools_of(
    documents: Documents, share: float, *, long_tokens: int | None = None, long_share: float | None = None
) -> list[Pool]:
    """Return one pool of all documents, or two: those of at least `long_tokens`, at `long_share`, and the rest.

    Raises:
        RecipeError: one of the two would be empty.
    """
    if long_tokens is None or long_share is None:
        return [Pool(documents=documents, share=share, numbers=range(len(documents.lengths)))]
    is_long = documents.lengths >= long_tokens
    if is_long.all() or not is_long.any():
        which = "all" if is_long.all() else "none"
        raise RecipeError(
            f"data.sources ({documents.name}): {which} of its {len(is_long)} documents have at least long_tokens: "
            f"{long_tokens} tokens (the longest {int(documents.lengths.max())}); leave long_tokens and long_share out"
        )
    split = ((is_long, long_share), (~is_long, 1 - long_share))
    return [
        Pool(documents=documents, share=share * part, numbers=np.flatnonzero(mask).tolist()) for mask, part in split
    ]


class _Draw:
    """The pieces of a pool in a drawn order, over and over: every piece once before any twice."""

    def __init__(self, number: int, pool: Pool, shape: Shape, seed: int) -> None:
        self.pool, self.seed, self.number = pool, seed, number
        self.pieces = [p for d in pool.numbers for p in _pieces(number, d, int(pool.documents.lengths[d]), shape)]
        self.emitted, self.at = 0, 0
        self.order: list[int] = []

    def next(self) -> Piece:
        epoch, place = divmod(self.at, len(self.pieces))
        if place == 0:
            rng = np.random.default_rng([self.seed, self.number, epoch])
            self.order = rng.permutation(len(self.pieces)).tolist()
        self.at += 1
        return self.pieces[self.order[place]]


def _pieces(pool: int, document: int, length: int, shape: Shape) -> Iterator[Piece]:
    """Yield a document cut from its start into whole rows and a tail."""
    start = 0
    while start < length:
        bos = shape.bos is not None and (shape.every_piece or start == 0)
        room = shape.row_tokens - bos
        ends = shape.eos is not None and (shape.every_piece or length - start < room)
        stop = min(length, start + room - ends)
        piece = Piece(pool, document, start, stop, bos, ends)
        if piece.size == shape.row_tokens or (piece.size >= shape.min_tokens and not shape.whole_rows):
            yield piece
        start = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which pieces stand in which row. Rows are made when asked for, each a function of its number."""

    pools: tuple[Pool, ...]
    shape: Shape
    rows: tuple[tuple[Piece, ...], ...]
    epochs: tuple[float, ...]

    def row(self, number: int) -> Row:
        """Return one row, padded behind its last piece where no further one fitted."""
        ids = np.zeros(self.shape.row_tokens, dtype=np.int64)
        positions, labels = np.zeros_like(ids), np.full_like(ids, IGNORED)
        at = 0
        for piece in self.rows[number]:
            tokens = self.tokens(piece)
            end = at + len(tokens)
            ids[at:end], labels[at + 1 : end] = tokens, tokens[1:]
            positions[at:end] = np.arange(len(tokens))
            at = end
        positions[at:] = np.arange(len(ids) - at)
        return Row(ids, positions, labels)

    def tokens(self, piece: Piece) -> Int64[ndarray, " tokens"]:
        """Return the ids of a piece."""
        inside = self.pools[piece.pool].documents.ids(piece.document)[piece.start : piece.stop]
        before = np.full(int(piece.bos), self.shape.bos or 0, dtype=np.int64)
        behind = np.full(int(piece.eos), self.shape.eos or 0, dtype=np.int64)
        return np.concatenate((before, inside, behind))

    def lengths(self) -> dict[int, int]:
        """Return how many tokens stand in pieces of up to 2, 4, 8, ... tokens: a "long" row may hold nothing long."""
        found: dict[int, int] = {}
        for row in self.rows:
            for piece in row:
                bucket = 1 << (piece.size - 1).bit_length()
                found[bucket] = found.get(bucket, 0) + piece.size
        return dict(sorted(found.items()))

    def padding(self) -> float:
        """Return the share of all tokens that are padding."""
        filled = sum(piece.size for row in self.rows for piece in row)
        return 1 - filled / max(1, len(self.rows) * self.shape.row_tokens)

    def digest(self) -> str:
        """Return 16 hex digits of a SHA-256: equal for plans that train on the same tokens in the same order.

        Of every source's own hash, the shape, and which piece stands where; no row has to be made for it.
        """
        hashes = [pool.documents.data_hash for pool in self.pools]
        digest = hashlib.sha256(repr((hashes, self.shape)).encode())
        for row in self.rows:
            digest.update(len(row).to_bytes(8, "little"))
            digest.update(np.asarray(row, dtype="<i8").tobytes())
        return digest.hexdigest()[:16]


def plan_rows(pools: Sequence[Pool], shape: Shape, *, num_rows: int, seed: int) -> Plan:
    """Return `num_rows` rows, drawn from the pools so that each gives its share of the tokens.

    A piece of a whole row is a row. Shorter ones are put one behind another; the one that does not fit is cut, and
    goes on in the next such row. Rows are planned in order, so that fewer rows are the first of more.

    Raises:
        RecipeError: a pool has no piece long enough, or a row has no room for more than BOS and EOS.
    """
    if shape.row_tokens <= shape.bookends:
        raise RecipeError(f"data.row_tokens: {shape.row_tokens} hold BOS and EOS and no token between; give more")
    draws = [_Draw(number, pool, shape, seed) for number, pool in enumerate(pools)]
    for draw in draws:
        if not draw.pieces:
            longest = int(max((draw.pool.documents.lengths[d] for d in draw.pool.numbers), default=0))
            needed = shape.row_tokens if shape.whole_rows else shape.min_tokens
            raise RecipeError(
                f"data.sources ({draw.pool.documents.name}): none of its {len(draw.pool.numbers)} documents gives a "
                f"piece of {needed} tokens (the longest has {longest}); give longer documents, or ask for less"
            )
    total = sum(pool.share for pool in pools)
    rows: list[tuple[Piece, ...]] = []
    open_row: list[Piece] = []
    room = shape.row_tokens
    while len(rows) < num_rows:
        given = sum(draw.emitted for draw in draws)
        draw = max(draws, key=lambda each: each.pool.share / total * given - each.emitted)
        piece: Piece | None = draw.next()
        if piece.size == shape.row_tokens:
            rows.append((piece,))
            draw.emitted += piece.size
            continue
        while piece is not None:
            # A piece is never bookends alone
            if room < max(shape.min_tokens, 1 + shape.every_piece * shape.bookends):
                rows.append(tuple(open_row))
                open_row, room = [], shape.row_tokens
            taken, piece = _cut(piece, room, shape)
            open_row.append(taken)
            room -= taken.size
            draw.emitted += taken.size
    epochs = tuple(draw.at / len(draw.pieces) for draw in draws)
    return Plan(pools=tuple(pools), shape=shape, rows=tuple(rows[:num_rows]), epochs=epochs)


def _cut(piece: Piece, room: int, shape: Shape) -> tuple[Piece, Piece | None]:
    """Return what fits into the room of a row, and what is left if that is long enough to be kept."""
    if piece.size <= room:
        return piece, None
    ends = piece.eos and shape.every_piece
    at = piece.start + room - piece.bos - ends
    rest = piece._replace(start=at, bos=piece.bos and shape.every_piece)
    return piece._replace(stop=at, eos=ends), rest if rest.size >= shape.min_tokens else None


def pose_positions(
    row_tokens: int, *, chunks: int, context: int, rng: np.random.Generator
) -> Int64[ndarray, " tokens"]:
    """Return positions of one row: `chunks` runs of consecutive ones, each begun at random behind the one before.

    The first run begins at 0, and the last may end at context - 1, so that every distance below the context comes
    about. The text of the runs is consecutive.

        row_tokens 8, chunks 2, context 32    [0 1 2 | 17 18 19 20 21]

    Source: Zhu et al. 2023, arXiv 2309.10400, sec. 3.2: chunk lengths and skips are uniform.
    """
    cuts = np.sort(rng.choice(np.arange(1, row_tokens), chunks - 1, replace=False))
    chunk = np.searchsorted(cuts, np.arange(row_tokens), side="right")
    skips = [0]
    for _ in range(chunks - 1):
        skips.append(int(rng.integers(skips[-1], context - row_tokens + 1)))
    return np.arange(row_tokens) + np.asarray(skips)[chunk]
