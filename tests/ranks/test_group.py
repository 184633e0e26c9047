"""Ranks meet, exchange values, and learn that another one has failed or ended."""

import itertools
import os
import signal
import socket
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
from campaign import thinned
from in_ranks import Failed, all_in_ranks, in_ranks, results_of

from emrun.base.errors import RankFailed, UsageError
from emrun.ranks import group as emrun_ranks
from emrun.ranks.group import Ranks, has_joined, join, leave, number_of_ranks, ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 7, 8, 100])
def test_the_shares_of_all_ranks_are_the_rows_in_their_order_and_differ_by_at_most_one(size, count):
    shares = [Ranks(rank, size).share(count) for rank in range(size)]
    assert [row for begin, end in shares for row in range(begin, end)] == list(range(count))
    lengths = [end - begin for begin, end in shares]
    assert max(lengths) - min(lengths) <= 1
    shares = [Ranks(rank, size, least=2).share(count) for rank in range(size)]
    assert [row for begin, end in shares for row in range(begin, end)] == list(range(count))
    assert count == 1 or all(end - begin != 1 for begin, end in shares)


def exchanged():
    joined = join()
    total, copied, largest = (
        torch.full((3,), joined.rank + 1.0),
        torch.full((2,), joined.rank),
        torch.tensor([joined.rank]),
    )
    joined.add_up(total)
    joined.copy_from_first(copied)
    end = joined.begin_maximum(largest)
    end()
    return {
        "rank": (joined.rank, joined.size, joined.local, joined.is_first, joined.several, ranks() is joined),
        "from_first": joined.from_first("one", ("of", joined.rank)),
        "gathered": joined.gathered("tens", joined.rank * 10),
        "all": joined.all_gathered("tens", joined.rank * 10),
        "tensors": (total.tolist(), copied.tolist(), largest.tolist()),
    }


def test_three_ranks_exchange_values(of_three):
    found = of_three["values"]
    assert [each["rank"] for each in found] == [(rank, 3, rank, rank == 0, True, True) for rank in range(3)]
    assert [each["gathered"] for each in found] == [[0, 10, 20], [], []]
    for each in found:
        assert each["from_first"] == ("of", 0)
        assert each["all"] == [0, 10, 20]
        assert each["tensors"] == ([6.0] * 3, [0, 0], [2])


# --- names of exchanges -----------------------------------------------------------------------------------------------


def exchanged_by_name(how, names, values):
    joined = join()
    name, value = names[joined.rank], values[joined.rank]
    if how != "in_step":
        return getattr(joined, how)(name, value)
    with joined.in_step() as exchange:
        return exchange(name, value)


SIZES = {"equal": (1, 1), "longer on rank 1": (None, "x" * 5000), "longer on rank 0": (b"y" * 5000, 2)}
WAYS = {"from_first": (0, 0), "gathered": (slice(None), []), "all_gathered": (slice(None),) * 2, "in_step": (0, 0)}


WAYS_AND_SIZES = list(itertools.product(WAYS, SIZES))


def exchanged_in_all_ways(names):
    return [exchanged_by_name(how, names, SIZES[size]) for how, size in WAYS_AND_SIZES]


def test_ranks_exchange_values_of_any_sizes_by_one_name(of_two):
    for (how, size), first, second in zip(WAYS_AND_SIZES, *of_two["sizes"], strict=True):
        values = SIZES[size]
        assert first == values[WAYS[how][0]] or first == [*values]
        assert second == ([] if how == "gathered" else first)


def test_two_names_are_an_error_on_both_ranks_that_has_them(of_two):
    why = ": code that runs on some ranks only, or in another order there, calls what all ranks must call"
    for way in WAYS_AND_SIZES:
        found = of_two["two names", *way]
        assert [each.kind for each in found] == ["DifferentRanks"] * 2, way
        assert [each.message for each in found] == [
            f"rank 1 is at 'run directory', this rank (0) at 'state of the hooks'{why}",
            f"rank 0 is at 'state of the hooks', this rank (1) at 'run directory'{why}",
        ], way


@pytest.mark.parametrize("how", WAYS)
def test_one_rank_of_three_with_another_name_ends_all(of_three, how):
    found = of_three["another name", how]
    assert [each.kind for each in found] == ["DifferentRanks"] * 3
    assert [each.message.partition(":")[0] for each in found] == [
        "rank 2 is at 'two', this rank (0) at 'one'",
        "rank 2 is at 'two', this rank (1) at 'one'",
        "rank 0 is at 'one', this rank (2) at 'two'",
    ]


def ways(*of_ranks):
    joined = join()
    how = of_ranks[joined.rank]
    if how in ("leaves the block", "fails"):
        with joined.in_step():
            if how == "fails":
                raise UsageError("mistake")
    elif how == "is in the block":
        with joined.in_step() as exchange:
            exchange("run directory", 3)
    else:
        getattr(joined, how)("run directory", 3)


EXCHANGES = ["is in the block", "from_first", "gathered", "all_gathered"]


def test_a_rank_that_has_left_the_block_before_the_others_is_an_error_on_both(of_two):
    for how in EXCHANGES:
        found = of_two["left", how]
        assert [each.kind for each in found] == ["DifferentRanks"] * 2, how
        assert [each.message.partition(":")[0] for each in found] == [
            "rank 1 is at 'end of the block', this rank (0) at 'run directory'",
            "rank 0 is at 'run directory', this rank (1) at 'end of the block'",
        ], how


def test_the_error_of_a_rank_that_fails_is_known_to_the_other_whatever_it_exchanges(of_two):
    for how, failing in itertools.product(EXCHANGES, (0, 1)):
        found = of_two["failed", how, failing]
        assert (found[failing].kind, found[failing].message) == ("UsageError", "mistake"), how
        assert (found[1 - failing].kind, found[1 - failing].message) == (
            "RankFailed",
            f"rank {failing} failed (UsageError: mistake)",
        ), how


def test_a_failure_is_reported_rather_than_the_names_of_the_other_ranks(of_three):
    assert [each.kind for each in of_three["failed"]] == ["RankFailed", "RankFailed", "UsageError"]


COLLECTIVES = {
    "from_first": ["all_gather", "all_gather"],
    "gathered": ["all_gather", "gather"],
    "all_gathered": ["all_gather", "all_gather"],
}


def collectives():
    """Return way -> the collectives that an exchange calls."""
    joined, calls, patch = join(), [], pytest.MonkeyPatch()
    for name in ("all_gather", "gather"):
        original = getattr(torch.distributed, name)

        def counted(*arguments, _name=name, _original=original, **named):
            calls.append(_name)
            return _original(*arguments, **named)

        patch.setattr(torch.distributed, name, counted)
    found = {}
    for how in COLLECTIVES:
        getattr(joined, how)("value", joined.rank)
        found[how] = list(calls)
        calls.clear()
    patch.undo()
    return found


def test_a_name_costs_no_collective(of_two):
    assert of_two["collectives"] == [COLLECTIVES] * 2


# --- strangers, and ranks that end ------------------------------------------------------------------------------------


class Harmful:
    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (self.place,)


def exchanged_with_a_stranger(place, how):
    joined = replace(join(), key=b"our own")
    value = None
    if joined.rank == 1:
        joined, value = replace(joined, key=b"another"), Harmful(place)
    with pytest.raises(RankFailed, match="what came from rank 1 is not from a process of this run") as found:
        getattr(joined, how)("value", value)
    return found.value.is_cause


@pytest.mark.parametrize("how", thinned(["gathered", "all_gathered"], ["gathered"]))
def test_what_a_stranger_sends_is_not_decoded(tmp_path, how):
    first, _ = results_of(2, exchanged_with_a_stranger, tmp_path / "harm", how)
    assert first is True
    assert list(tmp_path.iterdir()) == []


def met_in(places):
    emrun_ranks.meet_in(places[int(os.environ["RANK"])])
    return join().all_gathered("range", torch.arange(int(os.environ["RANK"])))


def test_ranks_of_one_machine_meet_in_a_directory_if_they_have_its_key(tmp_path):
    places = [tmp_path / "one", tmp_path / "two"]
    for place in places:
        place.mkdir()
        (place / "key").write_bytes(place.name.encode())
    (places[1] / "store").symlink_to(places[0] / "store")
    found = results_of(2, met_in, places)
    assert {(each.kind, each.message[:14]) for each in found} == {("RankFailed", "what came from")}
    (places[0] / "store").unlink()
    for found in in_ranks(2, met_in, places[:1] * 2):
        assert [each.tolist() for each in found] == [[], [0]]


def test_one_process_exchanges_with_itself():
    one, tensor = Ranks(), torch.ones(2)
    one.add_up(tensor)
    one.copy_from_first(tensor)
    one.begin_maximum(tensor)()
    assert tensor.tolist() == [1, 1]
    assert (one.from_first("a", 3), one.gathered("b", 3), one.all_gathered("c", 3)) == (3, [3], [3])
    with one.in_step() as exchange:
        assert exchange("four", 4) == 4
    assert not one.several


def in_step(failing):
    joined = join()
    with joined.in_step() as exchange:
        assert exchange("first", f"rank {joined.rank}") == "rank 0"
        if joined.rank in failing:
            raise UsageError(f"mistake {joined.rank}")
        exchange("second", None)
    return "through"


FAILING = {(1,): 1, (0,): 0, (2, 1): 1, (0, 1, 2): 0}


@pytest.mark.parametrize(("failing", "speaker"), FAILING.items())
def test_all_ranks_leave_a_block_with_the_error_of_the_first_that_failed(of_three, failing, speaker):
    found = of_three["in step", failing]
    assert all(isinstance(each, Failed) for each in found)
    for rank, each in enumerate(found):
        if rank == speaker:
            assert (each.kind, each.message) == ("UsageError", f"mistake {speaker}")
        else:
            assert each.kind == "RankFailed"
            assert each.message == f"rank {speaker} failed (UsageError: mistake {speaker})"


def test_a_block_in_which_no_rank_fails(of_two):
    assert of_two["in step"] == ["through"] * 2


def status_of_another():
    joined = join()
    try:
        with joined.in_step():
            if joined.is_first:
                raise UsageError("mistake")
    except RankFailed as error:
        return error.exit_status
    except UsageError:
        return None
    return 0


def test_the_error_about_another_rank_has_its_exit_status(of_two):
    assert of_two["status"] == [None, 2]


def names_of_two():
    """Return the calls of two ranks that may fail."""
    names = ("state of the hooks", "run directory")
    calls = {
        ("two names", how, size): partial(exchanged_by_name, how, names, SIZES[size]) for how, size in WAYS_AND_SIZES
    }
    for how in EXCHANGES:
        calls["left", how] = partial(ways, how, "leaves the block")
        calls |= {("failed", how, 0): partial(ways, "fails", how), ("failed", how, 1): partial(ways, how, "fails")}
    return calls


@pytest.fixture(scope="module")
def of_two():
    """Return what two ranks find in one pair of processes, which costs less than one for each test."""
    sizes = partial(exchanged_in_all_ways, ("Größe \N{SNOWMAN}",) * 2)
    calls = {"sizes": sizes, "in step": partial(in_step, ()), "status": status_of_another, "collectives": collectives}
    failing = names_of_two()
    return all_in_ranks(2, {**failing, **calls}, failing)


@pytest.fixture(scope="module")
def of_three():
    """Return what three ranks find in one group of processes."""
    failing = {("another name", how): partial(exchanged_by_name, how, ("one", "one", "two"), (1, 2, 3)) for how in WAYS}
    failing |= {("in step", ranks): partial(in_step, ranks) for ranks in FAILING}
    failing["failed"] = partial(ways, "is in the block", "leaves the block", "fails")
    return all_in_ranks(3, {**failing, "values": exchanged}, failing)


def ends_early(how):
    joined = join()
    joined.all_gathered("begin", None)
    if joined.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if how == "sum":
            joined.add_up(torch.ones(3))
        elif how == "copy":
            joined.copy_from_first(torch.ones(3))
        elif how == "maximum":
            joined.begin_maximum(torch.ones(3))()
        elif how == "gather":
            joined.gathered("three", 3)
        else:
            joined.from_first("three", 3)
        joined.all_gathered("end", 3)  # rank 0 may have sent everything before
    except RankFailed as error:
        return str(error)
    return None


@pytest.mark.parametrize("how", thinned(["sum", "copy", "maximum", "gather", "first"], ["sum", "gather"]))
def test_a_rank_that_was_killed_is_noticed_at_the_next_exchange(how):
    message, killed = results_of(2, ends_early, how)
    assert killed == -signal.SIGKILL
    assert message == "another rank has ended"


def test_without_a_launcher_there_is_one_rank():
    assert {number_of_ranks({"WORLD_SIZE": each}) for each in ("", "0", "1", "-2", "x")} == {1}
    assert number_of_ranks({}) == 1
    assert join({}) is ranks()
    leave()
    assert not has_joined()
    assert not ranks().several


def test_a_variable_of_the_launcher_that_is_missing_is_named():
    with pytest.raises(UsageError, match=r"WORLD_SIZE=2: .* LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set; start"):
        join({"WORLD_SIZE": "2", "RANK": "0"})


def meets_nobody(address):
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    emrun_ranks._PATIENCE = timedelta(seconds=1)
    if address:
        emrun_ranks.meet_in(None)
    join()


@pytest.mark.parametrize(
    ("address", "where", "why"), [(True, "127.0.0.1:0", "1/2 clients joined"), (False, "", "not all of them are there")]
)
def test_a_rank_that_nobody_meets_is_an_error(address, where, why):
    (found,) = results_of(1, meets_nobody, address)
    assert found.kind == "UsageError"
    assert f"rank 0 of 2 cannot meet the others at {where}" in found.message
    assert why in found.message


def meets_at_a_port_in_use():
    emrun_ranks.meet_in(None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        join()


def test_a_port_in_use_is_an_error():
    (found,) = results_of(1, meets_at_a_port_in_use)
    assert found.kind == "UsageError"
    assert "address already in use" in found.message


def met_at(port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    emrun_ranks.meet_in(None)
    return join().all_gathered("process", os.getpid())


def test_ranks_that_torchrun_starts_again_do_not_read_what_those_before_have_left_in_its_store():
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    met = [in_ranks(2, met_at, store.port) for _ in range(2)]
    assert all(one == other for one, other in met)
    assert len({pid for each, _ in met for pid in each}) == 4
