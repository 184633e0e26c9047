"""The context of a pass that a stream function receives."""

import itertools
import random

import numpy as np
import pytest
import torch
from doubles import wrapped

from emrun.base.encoding import random_digest
from emrun.base.errors import StreamError
from emrun.base.randomness import preserved_randomness
from emrun.ranks.group import Ranks
from emrun.stream_context import StreamContext, WithLeftOut


def context(stream_name="train", seed=1, epoch=1, start=0):
    return StreamContext(stream_name, seed=seed, epoch=epoch, start=start)


def run(ctx, stream):
    """Read a stream of `ctx` like `StreamWrapper` does."""
    return (each.batch if isinstance(each, WithLeftOut) else each for each in ctx.counted(stream(ctx)))


def rows_of(ctx, *arguments, **options):
    def stream(ctx):
        yield from ctx.batches(*arguments, **options)

    return [rows.tolist() for rows in run(ctx, stream)]


def order_of(ctx, n=50):
    (rows,) = rows_of(ctx, n, n, shuffle=True)
    return rows


# Order


def test_without_shuffling_the_rows_are_in_order():
    assert rows_of(context(), 5, 2) == [[0, 1], [2, 3], [4]]


def test_rows_are_int64():
    (rows,) = run(context(), lambda ctx: ctx.batches(3, 3, shuffle=True))
    assert rows.dtype == np.int64


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("n", "batch_size"), [(0, 3), (1, 3), (3, 3), (7, 3), (9, 3), (5, 1)])
def test_a_pass_has_every_row_once(n, batch_size, shuffle):
    batches = rows_of(context(), n, batch_size, shuffle=shuffle)
    assert sorted(itertools.chain(*batches)) == list(range(n))
    assert all(len(rows) == batch_size for rows in batches[:-1])
    assert len(batches) == -(-n // batch_size)


@pytest.mark.parametrize(("n", "sizes"), [(0, []), (2, []), (3, [3]), (8, [3, 3]), (9, [3, 3, 3])])
def test_drop_last_leaves_a_shorter_batch_out(n, sizes):
    assert [len(rows) for rows in rows_of(context(), n, 3, shuffle=True, drop_last=True)] == sizes


def test_drop_last_leaves_other_rows_out_in_every_pass():
    left = [set(range(10)) - set(itertools.chain(*rows_of(context(epoch=i), 10, 4, True, True))) for i in range(1, 9)]
    assert len(set(map(frozenset, left))) > 1


def test_the_order_is_a_pure_function_of_seed_stream_and_pass():
    np.random.seed(0)
    first = order_of(context())
    np.random.seed(1)
    torch.rand(3)
    assert order_of(context()) == first != list(range(50))


@pytest.mark.parametrize("other", [{"seed": 2}, {"stream_name": "valid"}, {"epoch": 2}, {"epoch": 0}], ids=str)
def test_another_seed_stream_or_pass_has_another_order(other):
    assert order_of(context(**other)) != order_of(context())


def test_the_order_does_not_depend_on_the_batch_size():
    assert list(itertools.chain(*rows_of(context(), 50, 7, shuffle=True))) == order_of(context())


def test_the_order_does_not_depend_on_what_the_stream_draws():
    ctx = context()
    ctx.rng.random(100)
    assert order_of(ctx) == order_of(context())


def test_an_evaluation_pass_is_number_0_and_always_the_same():
    ctx = StreamContext("valid", seed=3)
    assert ctx.epoch == 0
    first = order_of(ctx), ctx.rng.random()
    again = StreamContext("valid", seed=3)
    assert (order_of(again), again.rng.random()) == first


def test_a_second_call_within_a_pass_has_an_order_of_its_own():
    def stream(ctx):
        yield from ctx.batches(50, 50, shuffle=True)
        yield from ctx.batches(50, 50, shuffle=True)

    first, second = (rows.tolist() for rows in run(context(), stream))
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("arguments", [(-1, 2), (5, 0), (5, -1), (5, "abc"), (5.0, 2)], ids=str)
def test_invalid_numbers_are_an_error(arguments):
    with pytest.raises(StreamError, match=r"stream 'train': ctx\.batches\(n=.*n must be a whole number, 0 or more"):
        rows_of(context(), *arguments)


# Generators


def test_each_generator_is_a_single_object():
    ctx = context()
    rng, generator = ctx.rng, ctx.torch_generator
    for _ in run(ctx, lambda ctx: ctx.batches(4, 2)):
        assert ctx.rng is rng
        assert ctx.torch_generator is generator


def draw_rng(ctx):
    return ctx.rng.random()


def draw_torch(ctx):
    return float(torch.rand((), generator=ctx.torch_generator))


@pytest.mark.parametrize("draw", [draw_rng, draw_torch])
def test_the_generators_are_reseeded_for_every_batch(draw):
    def stream(counts):
        def of(ctx):
            for index, _ in enumerate(ctx.batches(8, 2)):
                drawn = [draw(ctx) for _ in range(counts[index])]
                yield drawn[0]

        return of

    few, many = (list(run(context(), stream(counts))) for counts in ([1, 1, 1, 1], [3, 1, 40, 2]))
    assert few == many
    assert len(set(few)) == 4


@pytest.mark.parametrize("draw", [draw_rng, draw_torch])
@pytest.mark.parametrize("other", [{"seed": 2}, {"stream_name": "valid"}, {"epoch": 2}, {"epoch": 0}], ids=str)
def test_another_seed_stream_or_pass_has_other_random_numbers(draw, other):
    assert draw(context(**other)) != draw(context())


@pytest.mark.parametrize("draw", [draw_rng, draw_torch])
def test_random_numbers_do_not_depend_on_global_random_state(draw):
    torch.manual_seed(1)
    np.random.seed(1)
    first = draw(context())
    torch.manual_seed(2)
    np.random.seed(2)
    assert draw(context()) == first


def test_using_one_generator_within_a_batch_does_not_reset_the_other():
    def stream(ctx):
        for _ in ctx.batches(4, 2):
            yield draw_rng(ctx), draw_torch(ctx), draw_rng(ctx)

    for before, _, after in run(context(), stream):
        assert before != after


def test_rng_for_an_example_does_not_depend_on_its_batch():
    def of(batch_size):
        ctx = context()
        ctx.rng.random()
        return {
            int(row): ctx.rng_for(row).random()
            for rows in run(ctx, lambda ctx: ctx.batches(12, batch_size, shuffle=True))
            for row in rows
        }

    assert of(3) == of(5)
    assert len(set(of(3).values())) == 12


def test_rng_for_an_example_differs_from_pass_to_pass_and_stays_the_same_within_one():
    ctx = context()
    assert ctx.rng_for(3).random() == ctx.rng_for(3).random() == ctx.rng_for(np.int64(3)).random()
    assert ctx.rng_for(3).random() != context(epoch=2).rng_for(3).random()


# Going on in the middle of a pass


def plain(ctx):
    for rows in ctx.batches(20, 3, shuffle=True):
        yield rows.tolist(), ctx.rng.random()


def rng_before_the_loop(ctx):
    rng, generator = ctx.rng, ctx.torch_generator
    shift = rng.random()
    for rows in ctx.batches(20, 3, shuffle=True):
        yield rows.tolist(), shift, rng.random(), float(torch.rand((), generator=generator))


def both_generators_in_turn(ctx):
    for rows in ctx.batches(20, 3, shuffle=True):
        yield rows.tolist(), draw_rng(ctx), draw_torch(ctx), draw_rng(ctx)


def two_calls(ctx):
    for rows in ctx.batches(8, 3, shuffle=True):
        yield "first", rows.tolist(), ctx.rng.random()
    for rows in ctx.batches(8, 2, shuffle=True):
        yield "second", rows.tolist(), ctx.rng.random()


def draws_between_calls(ctx):
    rng = ctx.rng
    for rows in ctx.batches(8, 3):
        yield rows.tolist(), rng.random()
    chosen = rng.permutation(10)
    for rows in ctx.batches(8, 2):
        yield chosen[rows].tolist(), rng.random()


def empty_call_first(ctx):
    yield from ((rows.tolist(), draw_rng(ctx)) for rows in ctx.batches(0, 3))
    yield from ((rows.tolist(), draw_rng(ctx)) for rows in ctx.batches(20, 3, drop_last=True))


def calls_in_a_loop(ctx):
    for part in range(4):
        for rows in ctx.batches(5 + part, 3, shuffle=True, drop_last=part % 2 == 1):
            yield part, rows.tolist(), draw_rng(ctx)


def drawing_now_and_then(ctx):
    for index, rows in enumerate(ctx.batches(20, 3)):
        del index  # after skipping it counts from 0 again
        yield rows.tolist(), draw_rng(ctx) if rows[0] % 2 else None


SKIPPING = [
    plain,
    rng_before_the_loop,
    both_generators_in_turn,
    two_calls,
    draws_between_calls,
    empty_call_first,
    calls_in_a_loop,
    drawing_now_and_then,
]


@pytest.mark.parametrize("stream", SKIPPING)
def test_a_pass_that_starts_later_equals_the_rest_of_a_whole_pass(stream):
    whole = list(run(context(), stream))
    assert len(whole) >= 6
    for start in range(len(whole) + 1):
        assert list(run(context(start=start), stream)) == whole[start:], start


def test_batches_before_the_start_are_not_made():
    made = []

    def stream(ctx):
        for rows in ctx.batches(10, 2):
            made.append(rows.tolist())
            yield rows

    list(run(context(start=3), stream))
    assert made == [[6, 7], [8, 9]]


@pytest.mark.parametrize("stream", SKIPPING)
def test_a_start_beyond_the_end_of_the_pass_is_an_error(stream):
    batches = len(list(run(context(), stream)))
    with pytest.raises(StreamError, match=f"has {batches} batches; position {batches + 1} is beyond its end"):
        list(run(context(start=batches + 1), stream))


# The contract


def filters(ctx):
    for rows in ctx.batches(10, 2):
        if 4 not in rows:
            yield rows


def filters_the_last(ctx):
    for rows in ctx.batches(9, 2):
        if len(rows) == 2:
            yield rows


def stops_before_yielding(ctx):
    for rows in ctx.batches(10, 2):
        if 4 in rows:
            break
        yield rows


def stops_after_yielding(ctx):
    for rows in ctx.batches(10, 2):
        yield rows
        if 4 in rows:
            break


def stops_and_calls_again(ctx):
    yield from itertools.islice(ctx.batches(10, 2), 2)
    yield from ctx.batches(10, 2)


def yields_twice(ctx):
    for rows in ctx.batches(10, 2):
        yield rows
        if 4 in rows:
            yield rows


def yields_the_last_twice(ctx):
    for rows in ctx.batches(10, 2):
        yield rows
    yield rows


def yields_before(ctx):
    yield np.arange(2)
    yield from ctx.batches(10, 2)


def yields_between_calls(ctx):
    yield from ctx.batches(4, 2)
    yield np.arange(2)
    yield from ctx.batches(4, 2)


def draws_all_rows_first(ctx):
    yield from list(ctx.batches(10, 2))


def packs_pairs(ctx):
    calls = ctx.batches(8, 2)
    for rows in calls:
        yield np.concatenate([rows, next(calls)])


def two_calls_at_a_time(ctx):
    for one, two in zip(ctx.batches(8, 2), ctx.batches(8, 2), strict=True):
        yield np.concatenate([one, two])


def never_yields(ctx):
    for _ in ctx.batches(10, 10):
        pass
    yield from ()


BROKEN = [
    filters,
    filters_the_last,
    stops_before_yielding,
    stops_after_yielding,
    stops_and_calls_again,
    yields_twice,
    yields_the_last_twice,
    yields_before,
    yields_between_calls,
    draws_all_rows_first,
    packs_pairs,
    two_calls_at_a_time,
    never_yields,
]


@pytest.mark.parametrize(("stream", "buffer"), [
    *((stream, 0) for stream in BROKEN), (filters, 1), (yields_the_last_twice, 4), (never_yields, 4)
])  # fmt: skip
def test_a_stream_that_does_not_yield_once_for_each_set_of_rows_is_an_error(stream, buffer):
    wrapper = wrapped(stream, buffer, name="train")
    with wrapper, pytest.raises(StreamError, match=r"stream 'train' does not yield exactly one batch for each set"):
        list(wrapper)


def test_a_stream_that_yields_once_may_look_ahead_into_its_own_data():
    def stream(ctx):
        rows = ctx.batches(6, 2)
        for _ in range(3):  # never asks for a fourth set
            yield next(rows)

    assert [rows.tolist() for rows in run(context(), stream)] == [[0, 1], [2, 3], [4, 5]]


def test_a_stream_that_does_not_use_ctx_batches_may_yield_any_number_of_batches():
    def stream(ctx):
        for number in ctx.rng.integers(0, 10, size=5):
            if number % 2:
                yield number

    assert list(run(context(), stream)) == list(run(context(), stream))


def test_a_stream_function_can_be_called_by_hand():
    assert [rows for rows, _ in plain(context())] == [rows for rows, _ in run(context(), plain)]
    assert list(plain(context(start=3))) == list(plain(context()))[3:]


@pytest.mark.parametrize("sizes", [[], [0], [4], [3, 5, 0, 2], [1] * 9], ids=str)
def test_blocks_are_shuffled_as_wholes_and_within_themselves(sizes):
    order = list(itertools.chain(*rows_of(context(), sum(sizes), 3, shuffle=True, blocks=sizes)))
    assert sorted(order) == list(range(sum(sizes)))
    block_of = np.repeat(np.arange(len(sizes)), sizes)[order]
    assert 1 + np.count_nonzero(np.diff(block_of)) == len([size for size in sizes if size]) or not sizes or not order


def test_the_order_of_blocks_and_within_them_differs_from_pass_to_pass_and_skips_like_any():
    sizes = [10, 10, 10, 10]
    first = list(itertools.chain(*rows_of(context(epoch=1), 40, 7, shuffle=True, blocks=sizes)))
    again = list(itertools.chain(*rows_of(context(epoch=1), 40, 7, shuffle=True, blocks=sizes)))
    second = list(itertools.chain(*rows_of(context(epoch=2), 40, 7, shuffle=True, blocks=sizes)))
    assert first == again
    assert first != second
    assert [row % 10 for row in first[:10]] != list(range(10))
    late = list(itertools.chain(*rows_of(context(epoch=1, start=3), 40, 7, shuffle=True, blocks=sizes)))
    assert late == first[21:]


def test_without_shuffle_blocks_change_nothing():
    assert list(itertools.chain(*rows_of(context(), 9, 2, blocks=[4, 5]))) == list(range(9))


def test_blocks_of_another_number_of_rows_are_an_error():
    with pytest.raises(StreamError, match=r"the blocks of ctx.batches must have 9 rows in total, not 8"):
        rows_of(context(), 9, 2, shuffle=True, blocks=[4, 4])


# Worker processes


def in_turns(shares):
    """Return what the workers' batches are in the order in which the loop takes them."""
    taken = [shares[index % len(shares)][index // len(shares)] for index in range(sum(map(len, shares)))]
    assert sum(map(len, shares)) == len(taken)
    return taken


SIZES = [20], [7, 0, 5, 20], [1, 1, 1, 1, 1, 1]
TURNS = [  # every pair of values
    (SIZES[(row + column) % 3], start, workers, ("rows", "stream")[(row + column) % 2])
    for row, start in enumerate((0, 1, 2, 5))
    for column, workers in enumerate((1, 2, 3, 8))
]


@pytest.mark.parametrize(("sizes", "start", "workers", "ends_first"), TURNS, ids=str)
def test_workers_take_turns_and_draw_the_same(sizes, start, workers, ends_first):
    def stream(ctx):
        for size in sizes:
            rows_of_call = ctx.batches(size, 3, shuffle=True)
            pairs = ((rows, None) for rows in rows_of_call)
            if ends_first == "stream":  # it leaves the call without asking it for its end
                own = list(ctx_like(ctx, size))
                pairs = zip(rows_of_call, own, strict=False) if not own else ((next(rows_of_call), None) for _ in own)
            for rows, _ in pairs:
                yield rows.tolist(), ctx.rng.random(), torch.rand(1, generator=ctx.torch_generator).item()
        yield_nothing = ctx.rng.random()
        assert yield_nothing >= 0

    def ctx_like(ctx, size):
        copy = StreamContext("train", seed=1, epoch=1, start=ctx.start, worker=ctx._worker, workers=ctx._stride)
        copy._handed_out, copy._yielded, copy._orders = ctx._handed_out, ctx._yielded, ctx._orders
        return copy.batches(size, 3, shuffle=True)

    expected = list(run(context(), stream))[start:]
    shares = [
        list(run(StreamContext("train", seed=1, epoch=1, start=start, worker=worker, workers=workers), stream))
        for worker in range(workers)
    ]
    assert in_turns(shares) == expected


def test_in_a_worker_the_global_generators_are_seeded_for_each_batch():
    def drawn(worker, workers, start=0):
        ctx = StreamContext("train", seed=1, epoch=1, start=start, worker=worker, workers=workers)
        return list(run(ctx, lambda ctx: ((random.random(), np.random.rand(), torch.rand(1).item())
                                          for _ in ctx.batches(12, 3))))  # fmt: skip

    with preserved_randomness():
        alone = drawn(0, 1)
        assert in_turns([drawn(0, 2), drawn(1, 2)]) == alone
        assert drawn(0, 1, start=2) == alone[2:]
        assert len(set(alone)) == len(alone)


def test_without_workers_the_global_generators_are_left_alone():
    before = random_digest()
    rows_of(context(), 12, 3, shuffle=True)
    assert random_digest() == before


def test_batches_may_have_sizes_of_their_own():
    def sizes(**more):
        return [rows.tolist() for rows in StreamContext("train", seed=1, epoch=1, **more).batches(6, [1, 3, 2])]

    assert sizes() == [[0], [1, 2, 3], [4, 5]]
    assert sizes(start=1) == [[1, 2, 3], [4, 5]]
    assert sizes(workers=2, worker=1) == [[1, 2, 3]]
    assert sizes(ranks=Ranks(1, 2)) == [[0], [2, 3], [5]]  # the first row counts nothing
    for wrong, message in (([1, 3], "have 4 of 6 rows"), ([6, 0], "is invalid"), ([1.0, 5], "is invalid")):
        with pytest.raises(StreamError, match=message):
            next(StreamContext("train", seed=1).batches(6, wrong))
