"""Running statistics against NumPy, whatever the batches, dtypes, lengths and weights."""

from itertools import product

import numpy as np
import pytest
import torch
from campaign import thinned

from emrun.record.running_stats import RUNNING, RunningStats

CAPACITY = 8192  # about where a buffer of values is reduced
MOST = 1024  # and after so many batches


def running(aggregations, batches, weights=None):
    """Return the statistics of batches of examples."""
    stats = RunningStats(aggregations)
    for index, batch in enumerate(batches):
        stats.add(batch, len(batch), None if weights is None else weights[index])
    return stats.result()


def by_numpy(values):
    """Return every running aggregation of an array in double precision."""
    values = np.asarray(values, dtype=np.float64).ravel()
    nans = int(np.isnan(values).sum())
    with np.errstate(invalid="ignore"):
        found = {name: float(getattr(np, name)(values)) for name in ("mean", "sum", "min", "max", "std", "var")}
    return {**found, "count": values.size, "nancount": nans, "nanfraction": nans / values.size}


def split(values, sizes):
    """Cut an array into batches of these sizes, over and over."""
    batches, first = [], 0
    while first < len(values):
        size = sizes[len(batches) % len(sizes)]
        batches.append(values[first : first + size])
        first += size
    return batches


def some(n, *shape, seed=0):
    return np.random.default_rng(seed).normal(3.0, 2.0, size=(n, *shape))


TOTALS_AND_SIZES = [  # of all values, and of batches
    *((1, [1000]), (2, [7, 512, 1, 3000]), (CAPACITY - 1, [CAPACITY]), (CAPACITY, [CAPACITY]), (CAPACITY, [1000])),
    *((CAPACITY + 1, [CAPACITY]), (CAPACITY + 1, [CAPACITY + 1]), (2 * CAPACITY, [CAPACITY]), (2 * CAPACITY, [1000])),
    *((3 * CAPACITY + 7, [7, 512, 1, 3000]), (3 * CAPACITY + 7, [CAPACITY + 1]), (3 * CAPACITY + 7, [5 * CAPACITY])),
]


@pytest.mark.parametrize(("total", "sizes"), TOTALS_AND_SIZES, ids=str)
def test_statistics_are_those_of_numpy_however_the_values_are_cut(total, sizes):
    values = some(total)
    assert running(RUNNING, split(values, sizes)) == pytest.approx(by_numpy(values), rel=1e-12)


@pytest.mark.parametrize("scalars", [False, True])
def test_no_number_is_rounded_where_dtypes_change(scalars):
    large = 2**53 - 1  # more than single precision can tell from its neighbours
    values = [torch.tensor([each], dtype=dtype) for each, dtype in ((0.5, torch.float32), (large, torch.int64))]
    values += [torch.tensor([0.25], dtype=torch.bfloat16), torch.tensor([-large], dtype=torch.float64)]
    batches = [value[0] if scalars else value for value in values]
    stats = RunningStats(["min", "max"])
    for batch in batches:
        stats.add(batch, 1)
    assert stats.result() == {"min": -large, "max": large}


@pytest.mark.parametrize("scalars", [False, True])
def test_no_number_is_rounded_where_the_dtype_changes_after_many_batches_of_another(scalars):
    stats = RunningStats(["min", "max", "count"])
    batches = [(0.5, torch.float32)] * 5 + [(2**53 - 1, torch.int64)] * 3 + [(-(2**53 - 1), torch.float64)] * 3
    for value, dtype in [*batches, *batches]:
        stats.add(torch.tensor(value if scalars else [value], dtype=dtype), 1)
    assert stats.result() == {"min": -(2**53 - 1), "max": 2**53 - 1, "count": 22}


@pytest.mark.parametrize("shape", [(), (3,), (3, 2)], ids=str)
def test_values_of_many_like_batches_that_are_changed_in_place_afterwards_were_copied(shape):
    stats, value, expected = RunningStats(["mean", "median"]), torch.zeros(shape), []
    for index in range(200):
        value.fill_(index)
        stats.add(value, 3)
        expected += [index]
    assert stats.result() == {"mean": np.mean(expected), "median": np.median(expected)}


def test_batches_of_another_length_among_like_ones_keep_their_weights():
    numbers = np.random.default_rng(7)
    batches = [numbers.random(length) for length in [4] * 5 + [3] + [4] * 70 + [3, 3, 3] + [4, 3] * 5]
    weights = [numbers.random(len(batch)) for batch in batches]
    stats = RunningStats(["mean"])
    for batch, weight in zip(batches, weights, strict=True):
        stats.add(torch.from_numpy(batch), len(batch), torch.from_numpy(weight))
    expected = np.average(np.concatenate(batches), weights=np.concatenate(weights))
    assert stats.result()["mean"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scalars", [False, True])
def test_an_integer_beside_single_precision_is_not_rounded(scalars):
    large = 2**53 - 1
    stats = RunningStats(["min", "max"])
    for value in (torch.tensor([0.5]), torch.tensor([large])):  # joined as they are they would be single precision
        stats.add(value[0] if scalars else value, 1)
    assert stats.result() == {"min": 0.5, "max": large}


def test_batches_of_one_example_add_up():
    values = some(CAPACITY + 100)
    assert running(RUNNING, split(values, [1])) == pytest.approx(by_numpy(values), rel=1e-12)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 5), (3000,)], ids=str)
def test_every_number_of_an_example_counts(shape):
    values = some(40, *shape)
    assert running(RUNNING, split(values, [4, 7])) == pytest.approx(by_numpy(values), rel=1e-12)


def as_list(values):
    return values.tolist()


def as_read_only(values):
    values = values.copy()
    values.flags.writeable = False
    return values


KINDS = {
    "array": np.array,
    "tensor": torch.tensor,
    "list": as_list,
    "tuple": lambda values: tuple(values.tolist()),
    "numbers": list,
    "read-only": as_read_only,
    "reversed": lambda values: values[::-1],
    "strided": lambda values: np.stack([values, values], axis=1)[:, 0],
    "parameter": lambda values: torch.nn.Parameter(torch.tensor(values), requires_grad=values.dtype.kind == "f"),
}


DTYPES = ["float64", "float32", "float16", "int64", "int32", "uint8", "bool"]
KINDS_AND_DTYPES = [
    *((kind, "float64") for kind in KINDS),
    *((kind, dtype) for kind in ("array", "tensor") for dtype in DTYPES[1:]),
    *(("list", "int64"), ("list", "bool"), ("numbers", "float16"), ("numbers", "bool"), ("tuple", "uint8")),
    *(("read-only", "bool"), ("reversed", "int32"), ("strided", "float16"), ("parameter", "int64")),
]


@pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES)
def test_values_may_have_any_type(kind, dtype):
    values = (np.abs(some(100)) * 2).astype(dtype)
    found = running(RUNNING, [KINDS[kind](part) for part in split(values, [30])])
    assert found == pytest.approx(by_numpy(values), rel=1e-12)


def test_single_precision_values_are_added_in_double_precision():
    values = np.full(100_000, 0.1, dtype=np.float32)
    found = running(["mean", "sum", "std"], split(values, [100]))
    assert found["sum"] == pytest.approx(100_000 * float(np.float32(0.1)), rel=1e-14)
    assert found["std"] < 1e-15


def test_a_small_variance_far_from_zero_is_exact():
    values = 1e9 + some(3 * CAPACITY)
    found = running(["var", "std"], split(values, [100]))
    assert found["var"] == pytest.approx(float(np.var(values)), rel=1e-6)


def test_tensors_with_gradients_are_taken_without_them():
    stats = RunningStats(["mean"])
    stats.add(torch.ones(3, requires_grad=True) * 2, 3)
    stats.add(torch.tensor(1.0, requires_grad=True).expand(3), 3)
    assert stats.result() == {"mean": 1.5}


@pytest.mark.parametrize("name", ["median", "ptp", "nanmean", "nanmax", "prod", "size", "any"])
def test_other_functions_of_numpy_get_all_values(name):
    values = some(CAPACITY + 300)[:, None] / 3
    if name == "prod":
        values = np.exp(values * 1e-3)
    if name.startswith("nan"):
        values[5] = np.nan
    found = running([name, "count"], split(values, [64, 3]))
    assert found[name] == pytest.approx(float(getattr(np, name)(values)), rel=1e-9)


@pytest.mark.parametrize("place", [0, 5, CAPACITY - 1, CAPACITY, 2 * CAPACITY])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_give_what_numpy_gives(value, place):
    values = some(3 * CAPACITY)
    values[place] = value
    assert running(RUNNING, split(values, [256])) == pytest.approx(by_numpy(values), rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("other", [np.inf, -np.inf, np.nan])
def test_several_values_that_are_not_finite_give_what_numpy_gives(other):
    values = some(3 * CAPACITY)
    values[10], values[2 * CAPACITY] = np.inf, other
    assert running(RUNNING, split(values, [256])) == pytest.approx(by_numpy(values), rel=1e-12, nan_ok=True)


def test_nans_are_counted():
    values = np.array([np.nan, 1.0, np.nan, 2.0])
    assert running(["nancount", "nanfraction", "count"], [values, values]) == {
        "nancount": 4,
        "nanfraction": 0.5,
        "count": 8,
    }


# --- weights ----------------------------------------------------------------------------------------------------------


def weighted(values, weights):
    mean = np.average(values, weights=weights)
    variance = np.average((values - mean) ** 2, weights=weights)
    return {"mean": mean, "var": variance, "std": variance**0.5}


@pytest.mark.parametrize("total", [50, CAPACITY, 3 * CAPACITY + 5])
def test_weights_weight_mean_and_spread(total):
    values, weights = some(total), np.random.default_rng(1).random(total)
    found = running(["mean", "var", "std"], split(values, [99]), split(weights, [99]))
    assert found == pytest.approx(weighted(values, weights), rel=1e-12)


def test_weights_leave_the_other_statistics_alone():
    values, weights = some(3 * CAPACITY), np.random.default_rng(1).random(3 * CAPACITY)
    names = ["sum", "min", "max", "count", "nancount", "nanfraction", "median"]
    assert running(names, split(values, [99]), split(weights, [99])) == running(names, split(values, [99]))


def test_the_weight_of_an_example_counts_for_each_of_its_numbers():
    values, weights = some(60, 4, 2), np.random.default_rng(1).random(60)
    found = running(["mean", "std"], split(values, [7]), split(weights, [7]))
    expected = weighted(values.ravel(), np.repeat(weights, 8))
    assert found == pytest.approx({"mean": expected["mean"], "std": expected["std"]}, rel=1e-12)


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list, as_list])
def test_weights_may_be_integers_of_any_type(kind):
    values, weights = some(20), np.arange(20)
    found = running(["mean"], [values], [kind(weights)])
    assert found["mean"] == pytest.approx(np.average(values, weights=weights))


def test_single_precision_weights_are_added_in_double_precision():
    values, weights = some(100_000), np.random.default_rng(1).random(100_000, dtype=np.float32)
    found = running(["mean", "var", "std"], split(values, [100]), split(weights, [100]))
    assert found == pytest.approx(weighted(values, weights.astype(np.float64)), rel=1e-12)


def test_integer_weights_weight_the_spread_too():
    values, weights = some(20), np.arange(20)
    found = running(["mean", "var", "std"], [values, values], [weights, weights])
    assert found == pytest.approx(weighted(values, weights), rel=1e-12)


@pytest.mark.parametrize(
    "weightless", [slice(0, CAPACITY), slice(0, 2 * CAPACITY), slice(CAPACITY, 2 * CAPACITY), slice(10, 20)]
)
def test_examples_without_weight_do_not_count(weightless):
    values, weights = some(3 * CAPACITY), np.ones(3 * CAPACITY)
    weights[weightless] = 0.0
    found = running(["mean", "var", "std"], split(values, [256]), split(weights, [256]))
    assert found == pytest.approx(weighted(values, weights), rel=1e-12)


def test_the_mean_with_a_total_weight_of_0_is_nan():
    assert np.isnan(running(["mean"], [some(3)], [np.zeros(3)])["mean"])


# --- scalars ----------------------------------------------------------------------------------------------------------


SCALARS = [float, np.float32, np.float64, np.array, torch.tensor]


@pytest.mark.parametrize(
    ("n", "kind"),
    thinned(product([5, CAPACITY + 10], SCALARS), [*product([5], SCALARS), (CAPACITY + 10, torch.tensor)]),
)
def test_a_scalar_counts_as_often_as_its_batch_has_examples(n, kind):
    values = some(n).astype(np.float32)
    lengths = np.random.default_rng(2).integers(1, 9, size=n)
    stats = RunningStats(RUNNING)
    for value, length in zip(values, lengths, strict=True):
        stats.add(kind(value), int(length))
    expected = by_numpy(np.repeat(values, lengths))
    assert stats.result() == pytest.approx(expected, rel=1e-9)


def test_a_numpy_function_gets_a_scalar_as_often_as_its_batch_has_examples():
    stats = RunningStats(["median", "mean"])
    for value, length in ((1.0, 4), (2.0, 1), (9.0, 1)):
        stats.add(value, length)
    assert stats.result() == {"median": 1.0, "mean": 2.5}
    weighted = RunningStats(["median"])
    for value, weights in ((1.0, [1.0, 0.0, 0.0]), (2.0, [5.0]), (9.0, [0.0] * 5)):
        weighted.add(value, len(weights), np.array(weights))
    assert weighted.result() == {"median": 1.0}  # that of a batch without weight is no value


def test_a_scalar_that_is_nan_counts_for_its_batch():
    stats = RunningStats(["nancount", "nanfraction", "count"])
    stats.add(float("nan"), 3)
    stats.add(1.0, 9)
    assert stats.result() == {"nancount": 3, "nanfraction": 0.25, "count": 12}


def test_a_scalar_is_weighted_by_the_weight_of_its_batch():
    stats = RunningStats(["mean"])
    stats.add(1.0, 2, np.array([1.0, 3.0]))
    stats.add(5.0, 1, np.array([12.0]))
    assert stats.result() == {"mean": (1.0 * 4 + 5.0 * 12) / 16}


@pytest.mark.parametrize("value", [True, 3, np.int8(3), np.True_])
def test_a_scalar_may_be_an_integer_or_a_truth_value(value):
    stats = RunningStats(["mean"])
    stats.add(value, 4)
    assert stats.result() == {"mean": float(value)}


# --- memory -----------------------------------------------------------------------------------------------------------


def held(stats):
    """Return how many numbers an object holds in tensors, arrays and lists; those of views once."""
    storages = {}

    def count(value):
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes() // value.element_size()
            return 1
        if isinstance(value, np.ndarray):
            return value.size
        if isinstance(value, dict):
            return sum(count(each) for each in value.values())
        if isinstance(value, list | tuple):
            return sum(count(each) for each in value)
        return 1

    return sum(count(value) for value in vars(stats).values()) + sum(storages.values())


@pytest.mark.parametrize("batch", [np.ones(64), np.ones((64, 300)), 1.0, np.ones(3 * CAPACITY)],
                         ids=["examples", "matrices", "scalars", "big"])  # fmt: skip
@pytest.mark.parametrize("is_weighted", [False, True])
def test_memory_does_not_grow_with_the_number_of_batches(batch, is_weighted):
    stats = RunningStats(RUNNING)
    length = 64 if np.ndim(batch) == 0 else len(batch)
    weights = np.ones(length) if is_weighted else None
    sizes = []
    for _ in range(4):
        for _ in range(0, 2 * CAPACITY, 64):
            stats.add(batch, length, weights)
            if np.size(batch) >= CAPACITY:
                break
        sizes.append(held(stats))
        assert sizes[-1] <= 3 * max(CAPACITY, np.size(batch)) + 100
    assert max(sizes) <= min(sizes) + CAPACITY
    assert stats.result()["mean"] == 1.0


@pytest.mark.parametrize("is_weighted", thinned([False, True], [True]))
def test_scalars_are_reduced_after_many_batches_and_their_statistics_are_those_of_numpy(is_weighted):
    batches = scalars_and_lengths(2 * MOST + 50)
    stats = add_scalars(RunningStats(RUNNING), batches, is_weighted, most_held=6 * MOST)
    values, lengths = np.array([value.item() for value, _ in batches]), [length for _, length in batches]
    assert stats.result() == pytest.approx(by_numpy(np.repeat(values, lengths)), rel=1e-12)


@pytest.mark.parametrize(
    ("cut", "is_weighted"),  # the first, the slots, a reduction
    thinned(
        product([0, 1, 2, 65, 66, MOST, MOST + 1, 2 * MOST + 49], [False, True]),
        [(66, True), (MOST + 1, False)],
    ),
)
def test_scalars_that_are_resumed_have_the_same_statistics_to_the_last_bit(cut, is_weighted):
    batches = scalars_and_lengths(2 * MOST + 50)
    whole, first, rest = RunningStats(RUNNING), RunningStats(RUNNING), RunningStats(RUNNING)
    add_scalars(whole, batches, is_weighted)
    add_scalars(first, batches[:cut], is_weighted)
    rest.load_state_dict(first.state_dict())
    add_scalars(rest, batches[cut:], is_weighted)
    assert rest.result() == whole.result()


def scalars_and_lengths(count):
    numbers = np.random.default_rng(5)
    return [(torch.tensor(numbers.random()), int(numbers.integers(1, 9))) for _ in range(count)]


def add_scalars(stats, batches, is_weighted, most_held=None):
    """Add scalars; at times, check how many numbers are held."""
    weights = torch.ones(8)
    for index, (value, length) in enumerate(batches):
        stats.add(value, length, weights[:length] if is_weighted else None)
        if most_held and index % 31 == 0:
            assert held(stats) <= most_held
    return stats


@pytest.mark.parametrize(
    "value", [torch.ones(5), np.ones(5), torch.ones(5, dtype=torch.float64), np.ones((5, 3)), torch.ones(())]
)
def test_a_value_that_is_changed_in_place_afterwards_was_copied(value):
    stats = RunningStats(["mean", "median"])
    weights = torch.ones(5)
    stats.add(value, 5, weights)
    value += 100
    weights *= 0
    stats.add(value, 5, torch.ones(5))
    assert stats.result() == {"mean": 51.0, "median": 51.0}


@pytest.mark.parametrize(("shape", "is_weighted"), thinned(product([(), (5,)], [False, True]), [((5,), True)]))
def test_a_state_does_not_change_with_what_comes_after_it(shape, is_weighted):
    values = torch.tensor(some(3 * CAPACITY // 5, 5)) if shape else torch.tensor(some(2400))
    weights = torch.ones(5) if is_weighted else None

    def take(stats, some):
        for value in some:
            stats.add(value, 5, weights)
        return stats

    names = [*RUNNING, "median"]
    first, expected = RunningStats(names), take(RunningStats(names), values).result()
    half = len(values) // 2
    state = take(first, values[:half]).state_dict()
    assert take(first, values[half:]).result() == expected
    for _ in range(2):  # nor with what is added to the one that took it
        other = RunningStats(names)
        other.load_state_dict(state)
        assert take(other, values[half:]).result() == expected


@pytest.mark.parametrize(("shape", "is_weighted"), thinned(product([(), (5,), (5, 3)], [False, True]), [((5,), True)]))
def test_what_follows_another_object_has_its_values_from_the_newest_on(shape, is_weighted):
    names, same = [*RUNNING, "median"], torch.zeros(shape)  # as a model whose outputs are always the same memory
    weights = torch.tensor([0.0, 1, 2, 1, 1]) if is_weighted else None
    first, followed, added = RunningStats(names), RunningStats(names), RunningStats(names)
    for index, value in enumerate(some(3000, *shape)):
        same.copy_(torch.as_tensor(value))
        first.add(same, 5, weights)
        assert first.source is same
        if index == 100:
            followed.follow(first)
        if index == 1500:  # what a state has does not change with what comes later; nor is a result of both affected
            state, followed = followed.state_dict(), RunningStats(names)
            followed.load_state_dict(state)
        if index == 1501:
            followed.follow(first)
        if index >= 100:
            added.add(same.clone(), 5, weights)
        if index == 2000:
            assert followed.count == added.count
            assert followed.result() == added.result()
            assert followed.begin_anew()
            added = RunningStats(names)
    assert followed.result() == added.result()
    assert followed.result()["count"] == 999 * 5 * (3 if len(shape) == 2 else 1)


def test_values_that_were_refused_are_not_those_that_were_copied_last():
    stats, value = RunningStats(["mean"]), torch.ones(5)
    stats.add(value, 5)
    with pytest.raises(ValueError, match="has 5 entries"):
        stats.add(value, 4)
    assert stats.source is None


def test_values_of_another_device_come_to_that_of_the_first():
    # Tensors on the device `meta` stand for those of a GPU.
    for shape in ((), (5,)):
        stats = RunningStats(["mean"])
        stats.add(torch.ones(shape, device="meta"), 5)
        stats.add(torch.ones(shape), 5)
        assert stats.state_dict()["values"].device.type == "meta"


def test_an_array_is_left_as_it_is():
    value = np.arange(5.0)
    value.flags.writeable = False
    running(RUNNING, [value, value])
    assert value.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_nothing_is_read_from_the_device_before_the_result():
    # Tensors on the device `meta` have no values: whatever reads one fails.
    stats = RunningStats(RUNNING)
    for _ in range(5):
        stats.add(torch.ones(5000, device="meta"), 5000, torch.ones(5000, device="meta"))
    with pytest.raises(RuntimeError, match=r"meta"):
        stats.result()


def test_more_values_may_follow_a_result():
    stats = RunningStats(["mean", "median", "count"])
    stats.add([1.0, 2.0], 2)
    assert stats.result() == {"mean": 1.5, "median": 1.5, "count": 2}
    stats.add([6.0], 1)
    assert stats.result() == {"mean": 3.0, "median": 2.0, "count": 3}


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "length", "message"),
    [
        ([1.0, 2.0], 3, "has 2 entries, but the batch has 3 examples"),
        (torch.ones(4, 2), 2, "has 4 entries, but the batch has 2 examples"),
    ],
)
def test_a_value_of_another_length_than_the_batch_is_an_error(value, length, message):
    with pytest.raises(ValueError, match=message):
        RunningStats(["mean"]).add(value, length)


def test_a_value_that_was_right_for_the_batch_before_is_an_error_in_a_longer_one():
    stats = RunningStats(["mean"])
    stats.add(torch.ones(2), 2)
    with pytest.raises(ValueError, match=r"has 2 entries, but the batch has 3 examples"):
        stats.add(torch.ones(2), 3)


@pytest.mark.parametrize("values", [([1.0, 2.0], 1.0), (1.0, [1.0, 2.0])])
def test_scalars_and_examples_do_not_mix(values):
    stats = RunningStats(["mean"])
    stats.add(values[0], 2)
    with pytest.raises(ValueError, match=r"is a scalar in some batches and has one entry per example in others"):
        stats.add(values[1], 2)


@pytest.mark.parametrize(
    "value", [["a", "b"], ["1", "2"], [None, 1.0], np.array(["a", "b"]), [{}, {}], [1j, 2.0], torch.tensor([1j, 2])]
)
def test_a_value_that_is_not_a_number_is_an_error(value):
    with pytest.raises(TypeError, match=r"number|numpy.str_"):
        RunningStats(["mean"]).add(value, 2)


def test_ragged_values_are_an_error():
    with pytest.raises(ValueError, match=r"inhomogeneous"):
        RunningStats(["mean"]).add([[1.0], [1.0, 2.0]], 2)


@pytest.mark.parametrize("weights", [np.ones(3), np.ones((2, 1)), np.ones((2, 2)), 1.0], ids=str)
def test_weights_are_one_number_per_example(weights):
    with pytest.raises(ValueError, match=r"has weights of shape .*, but the batch has 2 examples"):
        RunningStats(["mean"]).add([1.0, 2.0], 2, weights)


@pytest.mark.parametrize("weights", [(None, np.ones(2)), (np.ones(2), None)])
def test_weights_are_there_in_all_batches_or_in_none(weights):
    stats = RunningStats(["mean"])
    stats.add([1.0, 2.0], 2, weights[0])
    with pytest.raises(ValueError, match=r"has weights in some batches, but not in others"):
        stats.add([1.0, 2.0], 2, weights[1])


def test_values_with_weights_may_follow_those_of_a_rank_that_is_gone():
    """After a resume on fewer ranks, in an epoch in which this rank had no rows before."""
    stats, other = RunningStats(["mean"]), RunningStats(["mean"])
    other.add(torch.tensor([1.0, 3.0]), 2, torch.tensor([1.0, 0.0]))
    stats.merge(other.state_dict())
    stats.add(torch.tensor([5.0]), 1, torch.tensor([3.0]))
    assert stats.result() == {"mean": 4.0}


def test_examples_without_numbers_have_no_mean():
    found = running(["mean", "min", "std", "sum", "count", "nancount", "nanfraction"], [np.ones((2, 0))])
    assert {name for name, value in found.items() if np.isnan(value)} == {"mean", "min", "std", "nanfraction"}
    assert found["sum"] == found["count"] == found["nancount"] == 0
