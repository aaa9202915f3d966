"""Rows: every token once, at the right position, scored where it can be; and in a model, documents that stay alone."""

from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from evals.corpora import hash_ids
from recipes import packing
from recipes.load import RecipeError
from recipes.packing import IGNORED, Documents, Pool, Shape, plan_rows, pools_of, pose_positions
from recipes.train import Rows, collate
from recipes.tuning import Pose

BOS, EOS = 1, 2
APART = 10_000
"""Between the first ids of two documents: an id says which document it is of, and where in it."""


@dataclass(frozen=True)
class Counted:
    """Documents whose every id is another."""

    lengths: np.ndarray
    name: str = "counted"
    first: int = APART

    @property
    def data_hash(self):
        return f"{self.first} {self.lengths.tolist()}"

    def ids(self, number):
        return self.first + APART * number + np.arange(self.lengths[number])


def counted(*lengths, **more):
    return Counted(np.asarray(lengths, dtype=np.int64), **more)


@dataclass(frozen=True)
class Given:
    """Documents as given."""

    texts: tuple
    name: str = "given"

    @property
    def lengths(self):
        return np.asarray([len(text) for text in self.texts], dtype=np.int64)

    @property
    def data_hash(self):
        return hash_ids(self.texts)

    def ids(self, number):
        return np.asarray(self.texts[number], dtype=np.int64)


@st.composite
def shapes(draw):
    # A row holds BOS, EOS and a token between them at least; the shorter ones have a test of their own.
    row_tokens = draw(st.integers(3, 40))
    return Shape(
        row_tokens=row_tokens,
        bos=draw(st.sampled_from([None, BOS])),
        eos=draw(st.sampled_from([None, EOS])),
        every_piece=draw(st.booleans()),
        min_tokens=draw(st.one_of(st.integers(2, 3), st.integers(2, row_tokens))),
        whole_rows=draw(st.sampled_from([False, False, False, True])),
    )


@st.composite
def cases(draw, most_pools=1):
    """Pools, each with one document at least that gives a piece in any case; a shape; and the number of rows."""
    shape = draw(shapes())
    enough = shape.row_tokens + 2
    pools = []
    for number in range(draw(st.integers(1, most_pools))):
        short, long = st.integers(0, enough), st.integers(enough, 4 * enough)
        lengths = [*draw(st.lists(st.one_of(short, short, long), min_size=2, max_size=8)), draw(long)]
        documents = counted(*lengths, name=f"source {number}", first=APART * (1 + 100 * number))
        pools += pools_of(documents, draw(st.floats(0.1, 10)))
    return pools, shape, draw(st.one_of(st.integers(1, 60), st.just(40)))


def segments(row):
    """Return (ids, labels) of what stands between the places where the positions fall back to 0."""
    starts = [*np.flatnonzero(row.positions == 0), len(row.ids)]
    assert starts[0] == 0
    for start, stop in pairwise(starts):
        assert np.array_equal(row.positions[start:stop], np.arange(stop - start))
    return [(row.ids[start:stop], row.labels[start:stop]) for start, stop in pairwise(starts)]


def is_padding(ids, labels):
    return not ids.any() and (labels == IGNORED).all()


def inside(ids, shape):
    """Return a segment's tokens of its document, and whether BOS stands before them and EOS behind."""
    bos = shape.bos is not None and ids[0] == BOS
    eos = shape.eos is not None and ids[-1] == EOS
    return ids[int(bos) : len(ids) - int(eos)], bos, eos


def shortest(shape):
    """Return the tokens of the shortest piece: one of a document, and what must stand around it."""
    return 1 + shape.every_piece * sum(end is not None for end in (shape.bos, shape.eos))


def rows_of(plan):
    return [plan.row(number) for number in range(len(plan.rows))]


@given(cases(most_pools=2), st.integers(0, 5))
@settings(max_examples=300)
def test_every_row_is_made_of_runs_of_documents(case, seed):
    """From the arrays alone, as a model gets them."""
    pools, shape, num_rows = case
    plan = plan_rows(pools, shape, num_rows=num_rows, seed=seed)
    lengths = {
        1 + 100 * k + d: length for k, pool in enumerate(pools) for d, length in enumerate(pool.documents.lengths)
    }
    assert len(plan.rows) == num_rows
    for row in rows_of(plan):
        assert all(len(part) == shape.row_tokens and part.dtype == np.int64 for part in row)
        found = segments(row)
        at = 0
        for place, (ids, labels) in enumerate(found):
            at += len(ids)
            if is_padding(ids, labels):
                assert place == len(found) - 1
                assert not shape.whole_rows
                assert len(ids) < max(shape.min_tokens, shortest(shape))
                continue
            assert len(ids) >= shape.min_tokens
            assert not shape.whole_rows or len(ids) == shape.row_tokens
            assert labels[0] == IGNORED
            assert np.array_equal(labels[1:], ids[1:])
            text, bos, eos = inside(ids, shape)
            assert len(text), "a piece holds a token of its document"
            document, start = divmod(int(text[0]), APART)
            assert np.array_equal(text, text[0] + np.arange(len(text)))
            assert start + len(text) <= lengths[document]
            # BOS once a document, or once a piece
            assert bos == (shape.bos is not None and (shape.every_piece or start == 0))
            # EOS likewise; but an EOS that is left alone for the next row is a tail too short to be kept
            is_end = start + len(text) == lengths[document]
            if shape.eos is None or not (shape.every_piece or is_end):
                assert not eos
            elif shape.every_piece or at < shape.row_tokens:
                assert eos


def gone_through(pieces, placed, shape):
    """Check that what stands in rows is these pieces in order, some in parts; return how many have begun.

    Between the parts of a piece nothing is lost, and behind the last only what is shorter than min_tokens.
    """
    parts = iter(placed)
    part = next(parts, None)
    for number, piece in enumerate(pieces):
        if part is None:
            return number
        at = piece.start
        while at < piece.stop and part is not None and (part.document, part.start) == (piece.document, at):
            at, part = part.stop, next(parts, None)
        assert piece.start < at <= piece.stop
        # a rest that is not there may stand in the open row, if it is the last
        assert part is None or piece.stop - at < shape.min_tokens
    assert part is None, "nothing stands in a row that was not drawn"
    return len(pieces)


@given(cases(), st.integers(0, 5))
@settings(max_examples=300)
def test_an_epoch_takes_every_token_once_but_short_tails(case, seed):
    (pool,), shape, num_rows = case
    draw = packing._Draw(0, pool, shape, seed)
    epochs = [[draw.next() for _ in draw.pieces] for _ in range(2)]
    kept = shape.row_tokens if shape.whole_rows else shape.min_tokens
    for epoch in epochs:
        for document, length in enumerate(pool.documents.lengths):
            at = 0
            for piece in sorted(p for p in epoch if p.document == document):
                assert piece.start == at, "pieces neither overlap nor leave anything out between them"
                at = piece.stop
            assert at <= length
            assert length - at < kept
    # and the rows hold those pieces, in this order
    plan = plan_rows([pool], shape, num_rows=num_rows, seed=seed)
    num_drawn = round(plan.epochs[0] * len(draw.pieces))
    draw = packing._Draw(0, pool, shape, seed)
    drawn = [draw.next() for _ in range(num_drawn)]
    placed = [piece for row in plan.rows for piece in row]
    row_tokens = shape.row_tokens
    assert [p for p in placed if p.size == row_tokens] == [p for p in drawn if p.size == row_tokens]
    drawn, placed = ([p for p in pieces if p.size < row_tokens] for pieces in (drawn, placed))
    begun = gone_through(drawn, placed, shape)
    assert len(drawn) - begun <= row_tokens // shape.min_tokens, "what is not in a row yet stands in the open one"


def test_no_piece_is_bookends_alone():
    """Where two tokens are left of a row, there is no room for one between BOS and EOS."""
    shape = Shape(row_tokens=9, bos=BOS, eos=EOS, every_piece=True)
    plan = plan_rows(pools_of(counted(*[5] * 8), 1.0), shape, num_rows=4, seed=0)
    assert all(piece.stop > piece.start for row in plan.rows for piece in row)


def test_rows_without_room_beside_the_bookends_are_refused(monkeypatch):
    pieces = packing._pieces
    monkeypatch.setattr(packing, "_pieces", lambda *given: islice(pieces(*given), 100))  # not without end
    with pytest.raises(RecipeError, match="row_tokens"):
        plan_rows(
            pools_of(counted(5), 1.0),
            Shape(row_tokens=2, bos=BOS, eos=EOS, every_piece=True),
            num_rows=1,
            seed=0,
        )


@given(cases(most_pools=3), st.integers(0, 5), st.integers(1, 60))
@settings(max_examples=100)
def test_fewer_rows_are_the_first_of_more(case, seed, other):
    pools, shape, num_rows = case
    one, two = (plan_rows(pools, shape, num_rows=n, seed=seed) for n in sorted((num_rows, other)))
    assert two.rows[: len(one.rows)] == one.rows
    for mine, theirs in zip(rows_of(one), rows_of(two), strict=False):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_another_seed_gives_another_order():
    pools = pools_of(counted(*range(20, 60)), 1.0)
    shape = Shape(row_tokens=32, bos=BOS)
    one, again, other = (plan_rows(pools, shape, num_rows=30, seed=seed) for seed in (0, 0, 1))
    assert one.rows == again.rows
    assert one.rows != other.rows
    assert one.digest() == again.digest() != other.digest()


def test_an_epoch_has_another_order_than_the_one_before():
    draw = packing._Draw(0, pools_of(counted(*[8] * 40), 1.0)[0], Shape(row_tokens=8), seed=0)
    first, second = ([draw.next() for _ in range(40)] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second)
    assert plan_rows([draw.pool], draw_shape := Shape(row_tokens=8), num_rows=60, seed=0).epochs == (1.5,)
    assert plan_rows([draw.pool], draw_shape, num_rows=40, seed=0).epochs == (1.0,)


def given_tokens(plan):
    found = np.zeros(len(plan.pools))
    for row in plan.rows:
        for piece in row:
            found[piece.pool] += piece.size
    return found


def assert_shares(plan):
    """Drawing is off by less than a row for each other pool, and one row more is open when the plan ends."""
    found, shares = given_tokens(plan), np.asarray([pool.share for pool in plan.pools])
    off = found - found.sum() * shares / shares.sum()
    assert np.abs(off).max() <= plan.shape.row_tokens * len(plan.pools), (found, shares)


@given(cases(most_pools=3), st.integers(0, 5))
@settings(max_examples=100)
def test_shares_are_met(case, seed):
    pools, shape, _ = case
    for num_rows in (1, 10, 200):
        assert_shares(plan_rows(pools, shape, num_rows=num_rows, seed=seed))


def test_shares_are_met_where_tails_are_dropped():
    """Documents that lose much to cutting: what is lost in each row must not add up."""
    whole, cut = counted(*[640] * 8, name="whole"), counted(*[32, 60] * 20, name="cut")
    pools = [*pools_of(whole, 1.0), *pools_of(cut, 1.0)]
    assert_shares(plan_rows(pools, Shape(row_tokens=64, min_tokens=32), num_rows=1000, seed=0))


def test_shares_are_met_where_bookends_are_added():
    """A piece that is cut gets BOS and EOS twice, and these are tokens as well."""
    whole, cut = counted(*[640] * 8, name="whole"), counted(*[5] * 40, name="cut")
    pools = [*pools_of(whole, 3.0), *pools_of(cut, 1.0)]
    assert_shares(plan_rows(pools, Shape(row_tokens=9, bos=BOS, eos=EOS, every_piece=True), num_rows=2000, seed=0))


def test_long_documents_make_up_their_share():
    documents = counted(*[10] * 50, 200, 210, name="books")
    long, rest = pools_of(documents, 0.5, long_tokens=200, long_share=0.75)
    assert (list(long.numbers), long.share) == ([50, 51], 0.375)
    assert (list(rest.numbers), rest.share) == (list(range(50)), 0.125)
    plan = plan_rows([long, rest], Shape(row_tokens=50), num_rows=400, seed=0)
    assert_shares(plan)
    assert given_tokens(plan)[0] / given_tokens(plan).sum() == pytest.approx(0.75, abs=2 / 400)


@pytest.mark.parametrize("given", [{}, {"long_tokens": 5}, {"long_share": 0.5}])
def test_without_a_split_there_is_one_pool(given):
    (pool,) = pools_of(counted(3, 9), 0.25, **given)
    assert isinstance(pool.documents, Documents)
    assert (list(pool.numbers), pool.share) == ([0, 1], 0.25)


@pytest.mark.parametrize(("tokens", "which"), [(301, "none"), (20, "all"), (1, "all")])
def test_a_split_with_an_empty_side_is_refused(tokens, which):
    words = rf"data.sources \(books\): {which} of its 3 documents have at least long_tokens: {tokens} tokens "
    with pytest.raises(RecipeError, match=words + r"\(the longest 300\); leave long_tokens and long_share out"):
        pools_of(counted(20, 300, 21, name="books"), 1.0, long_tokens=tokens, long_share=0.5)


@pytest.mark.parametrize(("tokens", "long"), [(21, [1, 2]), (300, [1])])
def test_a_document_of_just_long_tokens_is_long(tokens, long):
    pools = pools_of(counted(20, 300, 21), 1.0, long_tokens=tokens, long_share=0.5)
    assert [list(pool.numbers) for pool in pools] == [long, sorted({0, 1, 2} - set(long))]


@pytest.mark.parametrize(
    ("shape", "needed"),
    [(Shape(row_tokens=64, min_tokens=32), 32), (Shape(row_tokens=64, min_tokens=2, whole_rows=True), 64)],
)
def test_a_pool_without_a_piece_names_its_source(shape, needed):
    pools = [*pools_of(counted(100, name="books"), 1.0), *pools_of(counted(7, 31, name="notes"), 1.0)]
    words = rf"\(notes\): none of its 2 documents gives a piece of {needed} tokens \(the longest has 31\); give longer"
    with pytest.raises(RecipeError, match=words):
        plan_rows(pools, shape, num_rows=1, seed=0)
    with pytest.raises(RecipeError, match=r"\(books\): none of its 0 documents"):
        plan_rows([Pool(documents=pools[0].documents, share=1.0, numbers=[])], shape, num_rows=1, seed=0)


@given(cases(most_pools=2), st.integers(0, 5))
@settings(max_examples=100)
def test_lengths_add_up(case, seed):
    pools, shape, num_rows = case
    plan = plan_rows(pools, shape, num_rows=num_rows, seed=seed)
    sizes = [len(ids) for row in rows_of(plan) for ids, labels in segments(row) if not is_padding(ids, labels)]
    found = plan.lengths()
    assert list(found) == sorted(found)
    assert sum(found.values()) == sum(sizes)
    assert plan.padding() == pytest.approx(1 - sum(sizes) / (num_rows * shape.row_tokens))
    for bucket, tokens in found.items():
        assert bucket.bit_count() == 1
        assert tokens == sum(size for size in sizes if bucket / 2 < size <= bucket) > 0


@given(cases(), st.data())
@settings(max_examples=100)
def test_the_digest_is_of_every_id(case, data):
    (pool,), shape, num_rows = case
    texts = [pool.documents.ids(n).tolist() for n in range(len(pool.documents.lengths))]

    def digest():
        documents = Given(tuple(texts))
        return plan_rows(pools_of(documents, 1.0), shape, num_rows=num_rows, seed=0).digest()

    plan, before = plan_rows([pool], shape, num_rows=num_rows, seed=0), digest()
    assert plan.digest() == plan_rows([pool], shape, num_rows=num_rows, seed=0).digest()
    assert before == digest()
    assert len(before) == 16
    pieces = [piece for row in plan.rows for piece in row if piece.stop > piece.start]
    piece = data.draw(st.sampled_from(pieces))
    texts[piece.document][data.draw(st.integers(piece.start, piece.stop - 1))] += 1
    assert digest() != before


def test_the_digest_is_of_the_borders_as_well():
    """The same ids cut elsewhere are scored otherwise."""
    pools = tuple(pools_of(counted(8), 1.0))
    one, other = (
        packing.Plan(
            pools=pools,
            shape=Shape(row_tokens=8),
            rows=tuple(tuple(packing.Piece(0, 0, *ends, bos=False, eos=False) for ends in row) for row in rows),
            epochs=(1.0,),
        )
        for rows in ([[(0, 4), (4, 8)]], [[(0, 3), (3, 8)]])
    )
    assert np.array_equal(one.row(0).ids, other.row(0).ids)
    assert one.digest() != other.digest()


def test_the_digest_is_of_the_order_and_of_what_stands_around_pieces():
    pools = pools_of(counted(*[8] * 20), 1.0)
    shapes = [Shape(row_tokens=10, bos=bos, eos=eos) for bos in (None, 1, 3) for eos in (None, 2, 4)]
    found = {plan_rows(pools, shape, num_rows=20, seed=seed).digest() for shape in shapes for seed in range(5)}
    assert len(found) == 45


@given(st.data())
@settings(max_examples=200)
def test_pose_positions(data):
    row_tokens = data.draw(st.integers(2, 50))
    chunks = data.draw(st.integers(2, min(6, row_tokens)))
    context = data.draw(st.integers(row_tokens, 400))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    found = pose_positions(row_tokens, chunks=chunks, context=context, rng=rng)
    steps = np.diff(found)
    assert found.shape == (row_tokens,)
    assert found.dtype == np.int64
    assert found[0] == 0
    assert (steps >= 1).all()
    assert (steps > 1).sum() <= chunks - 1
    assert found[-1] < context
    if context == row_tokens:
        assert np.array_equal(found, np.arange(row_tokens))


@pytest.mark.parametrize("chunks", [2, 3, 8])
def test_pose_reaches_every_distance(chunks):
    row_tokens, context = 8, 40
    seen, cuts = set(), set()
    for seed in range(2000):
        rng = np.random.default_rng(seed)
        found = pose_positions(row_tokens, chunks=chunks, context=context, rng=rng)
        seen |= set((found[:, None] - found[None, :]).ravel().tolist())
        cuts |= set((np.flatnonzero(np.diff(found) > 1) + 1).tolist())
    assert {d for d in seen if d > 0} == set(range(1, context))
    assert cuts == set(range(1, row_tokens)), "a chunk may begin at every token but the first"


@pytest.mark.parametrize("chunks", [2, 3, 8])
def test_pose_has_as_many_runs_as_asked_where_there_is_room(chunks):
    for seed in range(100):
        found = pose_positions(8, chunks=chunks, context=2**40, rng=np.random.default_rng(seed))
        assert (np.diff(found) > 1).sum() == chunks - 1


def test_pose_lengths_and_skips_are_uniform():
    """Two chunks: the border at 1..7 and the skip at 0..32, both alike often (chi-square, p about 0.001)."""
    skips, borders = np.zeros(33), np.zeros(8)
    for seed in range(3300):
        found = pose_positions(8, chunks=2, context=40, rng=np.random.default_rng(seed))
        skip = int(found[-1]) - 7
        skips[skip] += 1
        if skip:
            borders[int(np.argmax(np.diff(found))) + 1] += 1
    assert borders[0] == 0
    for counts, limit in ((skips, 62.5), (borders[1:], 22.5)):
        expected = counts.sum() / len(counts)
        assert ((counts - expected) ** 2 / expected).sum() < limit


# ---- in a model

LENGTHS = (11, 14, 7)
"""Three documents fill a row of 32 tokens."""


def texts_of(seed, lengths=LENGTHS):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 96, length).tolist() for length in lengths]


def packed(texts, shape=None):
    """Return rows that hold each text once, in the order in which they were drawn."""
    shape = shape or Shape(row_tokens=sum(LENGTHS))
    plan = plan_rows(pools_of(Given(tuple(texts)), 1.0), shape, num_rows=1, seed=0)
    (row,) = plan.rows
    return Rows(plan, pose=None, context=64, seed=0), [piece.document for piece in row]


def run(model, batch):
    """Return (hidden states, logits), each of one row."""
    with torch.no_grad():
        out = model(**batch, use_cache=False, output_hidden_states=True)
    return out.hidden_states[-1], out.logits


def test_documents_of_a_row_do_not_see_each_other(llama):
    texts = texts_of(0)
    rows, order = packed(texts)
    assert sorted(order) == [0, 1, 2]
    batch = collate([rows[0]])
    assert "attention_mask" not in batch
    del batch["labels"]
    before = run(llama, batch)
    borders = np.cumsum([0, *(LENGTHS[d] for d in order)])
    for changed in range(3):
        other = [*texts]
        other[order[changed]] = [3 + (token - 3 + 1) % 93 for token in texts[order[changed]]]
        again, same_order = packed(other)
        assert same_order == order
        row = collate([again[0]])
        own = slice(borders[changed], borders[changed + 1])
        assert (row["input_ids"] != batch["input_ids"]).nonzero()[:, 1].tolist() == list(range(own.start, own.stop))
        del row["labels"]
        for one, two in zip(before, run(llama, row), strict=True):
            for place in range(3):
                seen = slice(borders[place], borders[place + 1])
                if place == changed:
                    assert not (one[0, seen] == two[0, seen]).all(-1).any(), "its own tokens matter"
                else:
                    assert torch.equal(one[0, seen], two[0, seen])


@pytest.mark.parametrize("bookends", [{}, {"bos": BOS, "eos": EOS}])
def test_packed_losses_are_those_of_each_document_alone(llama, bookends):
    """Two rows with other borders in one batch, the second of them padded."""
    more = 2 * len(bookends and LENGTHS)
    shape = Shape(row_tokens=sum(LENGTHS) + more, **bookends)
    plan = plan_rows(pools_of(Given(tuple(texts_of(1, [*LENGTHS, 5, 4]))), 1.0), shape, num_rows=6, seed=3)
    pieces = plan.rows
    rows = Rows(plan, pose=None, context=64, seed=0)
    batch = collate([rows[number] for number in range(len(pieces))])
    labels = batch.pop("labels")
    assert batch["input_ids"].shape == (6, shape.row_tokens)
    _, logits = run(llama, batch)
    num_scored = 0
    for number, row in enumerate(pieces):
        at = 0
        for piece in row:
            ids = torch.as_tensor(plan.tokens(piece))[None]
            end = at + piece.size
            with torch.no_grad():
                alone = llama(input_ids=ids, use_cache=False).logits[0, :-1]
            expected = F.cross_entropy(alone, ids[0, 1:], reduction="none")
            found = F.cross_entropy(logits[number, at : end - 1], labels[number, at + 1 : end], reduction="none")
            # fp32 sums in another order
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            num_scored += len(found)
            at = end
    shifted = labels[:, 1:]
    assert (shifted != IGNORED).sum() == num_scored


def changed_before(batch, border):
    ids = batch["input_ids"].clone()
    ids[:, :border] = 3 + (ids[:, :border] - 3 + 1) % 93
    return batch | {"input_ids": ids}


def test_padding_sees_and_is_seen_by_nothing(llama):
    plan = plan_rows(
        pools_of(Given(tuple(texts_of(2, [20, 20]))), 1.0), Shape(row_tokens=32, min_tokens=16), num_rows=1, seed=0
    )
    row = collate([Rows(plan, pose=None, context=64, seed=0)[0]])
    labels = row.pop("labels")
    assert labels[0, 20:].tolist() == [IGNORED] * 12
    assert row["position_ids"][0].tolist() == [*range(20), *range(12)]
    one = run(llama, row)
    two = run(llama, changed_before(row, 20))
    for before, after in zip(one, two, strict=True):
        assert torch.equal(before[0, 20:], after[0, 20:])
        assert not (before[0, :20] == after[0, :20]).all(-1).any()


@pytest.fixture
def skipping():
    """A row of PoSE with a skip in it, and where the second chunk begins."""
    window = 32
    plan = plan_rows(
        pools_of(Given(tuple(texts_of(4, [window] * 8))), 1.0),
        Shape(row_tokens=window, whole_rows=True),
        num_rows=8,
        seed=0,
    )
    rows = Rows(plan, pose=Pose(window=window), context=256, seed=0)
    for number in range(len(rows)):
        steps = rows[number]["position_ids"].diff()
        border = int(steps.argmax()) + 1
        if steps.max() > 1 and 4 < border < 28:
            return collate([rows[number]]), border
    pytest.fail("no row with a skip in its midst")


def test_the_chunks_of_pose_see_each_other(llama, skipping):
    batch, border = skipping
    del batch["labels"]
    assert batch["attention_mask"].dtype == torch.long
    assert (batch["attention_mask"] == 1).all()
    found = run(llama, batch)
    for one, two in zip(found, run(llama, changed_before(batch, border)), strict=True):
        assert not (one[0, border:] == two[0, border:]).all(-1).any()
    length = batch["input_ids"].shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    for one, two in zip(found, run(llama, batch | {"attention_mask": causal}), strict=True):
        # fp32 sums in another order
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-4)


def test_without_the_mask_a_skip_would_be_a_border(llama, skipping):
    """The trap that the mask of ones is there for: transformers takes every step but 1 for another document."""
    batch, border = skipping
    del batch["labels"], batch["attention_mask"]
    for one, two in zip(run(llama, batch), run(llama, changed_before(batch, border)), strict=True):
        assert torch.equal(one[0, border:], two[0, border:])


def test_rows_of_pose_follow_the_seed_and_their_number():
    plan = plan_rows(pools_of(counted(*[16] * 9), 1.0), Shape(row_tokens=16, whole_rows=True), num_rows=9, seed=0)
    one, again, other = (Rows(plan, pose=Pose(window=16, chunks=3), context=500, seed=seed) for seed in (0, 0, 1))
    positions = [[rows[n]["position_ids"].tolist() for n in range(9)] for rows in (one, again, other)]
    assert positions[0] == positions[1]
    assert all(a != b for a, b in zip(positions[0], positions[2], strict=True))
    assert len({str(each) for each in positions[0]}) == 9
    for number in range(9):
        assert one[number]["input_ids"].tolist() == plan.row(number).ids.tolist()
        assert one[number]["labels"].tolist() == plan.row(number).labels.tolist()
