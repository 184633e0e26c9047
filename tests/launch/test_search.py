"""The samplers and pruners of Optuna, without any run."""

import pytest

from emrun.base.errors import ArgumentError
from emrun.config.yaml_tree import parse
from emrun.launch.parameters import read_parameters
from emrun.launch.results import Result
from emrun.launch.search import Search
from emrun.launch.settings import Sweep
from emrun.launch.trials import Experiment, Trial

PARAMETERS = read_parameters(parse("a: 1", "c.yaml"), ["m.lr={low: 1.0e-5, high: 0.1, log: true}", "m.n=[1, 2]"])


def search(seed=0, **settings):
    return Search(PARAMETERS, Sweep(**{"method": "tpe", "trials": 9, "objective": "valid/loss", **settings}), seed)


def experiment(tmp_path, values):
    return Experiment(values, (Trial((), tmp_path / f"trial-{values}", 0, None),))


def finished(value):
    return [Result("finished", None, [(1, value)], value, 1)]


def proposals(found, tmp_path, count=12):
    """Let a search minimise the distance of the logarithm to that of 0.001; return the learning rates."""
    rates = []
    for _ in range(count):
        values, proposal = found.propose()
        one = experiment(tmp_path, values)
        found.begin(one, proposal)
        found.end(one, finished(abs(values["m.lr"] - 0.001)))
        rates.append(values["m.lr"])
    return rates


def test_proposals_depend_on_the_seed_and_on_the_number_alone(tmp_path):
    one = [search(method="random").propose()[0] for _ in range(2)]
    assert one[0] == one[1]
    assert one[0] != search(method="random", seed=1).propose()[0]
    again = search(method="random")
    first, proposal = again.propose()
    again.repeat(proposal, finished(1.0))
    assert again.propose()[0] != first == one[0]


def test_a_search_that_is_made_again_from_results_goes_on_as_before(tmp_path):
    whole = search()
    rates = proposals(whole, tmp_path, 12)
    again = search()
    first = proposals(search(), tmp_path, 6)
    assert first == rates[:6]
    source = search()
    for _ in range(6):
        values, proposal = source.propose()
        one = experiment(tmp_path, values)
        source.begin(one, proposal)
        source.end(one, finished(abs(values["m.lr"] - 0.001)))
        again.end(one, finished(abs(values["m.lr"] - 0.001)))
    assert again.count == 6
    assert again.propose()[0]["m.lr"] == pytest.approx(rates[6])


def test_a_pruner_ends_what_is_worse_than_the_median(tmp_path):
    found = search(method="grid", trials=None, pruner={"median": {"n_startup_trials": 1}})
    good, bad = (experiment(tmp_path, {"m.lr": rate, "m.n": 0}) for rate in (0.01, 0.1))
    found.end(good, [Result("finished", None, [(0, 9.0), (1, 0.5), (2, 0.3)], 0.3, 1)])
    found.begin(bad)
    assert not found.should_prune(bad, [(0, 9.0)])
    assert not found.should_prune(bad, [(0, 9.0), (1, 0.4)])
    assert found.should_prune(bad, [(0, 9.0), (1, 0.4), (2, 0.6)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "tep"}, "Optuna has no 'tep'; did you mean 'tpe'?"),
        ({"method": {"tpe": {"startup": 5}}}, "tpe has no argument 'startup'"),
        ({"pruner": "mean"}, "Optuna has no 'mean'"),
        ({"pruner": {"median": {"n_startup_trials": -1}}}, "median: "),
    ],
)
def test_what_optuna_does_not_have_is_an_error(settings, message):
    with pytest.raises(ArgumentError, match=message.replace("?", r"\?")):
        search(**settings)


@pytest.mark.filterwarnings("ignore:BruteForceSampler is experimental")
@pytest.mark.parametrize("values", ["[1, 2]", "{low: 1, high: 3}"])
@pytest.mark.parametrize("results", ["finished", "failed"])
def test_a_sampler_that_has_tried_all_combinations_is_exhausted(tmp_path, values, results):
    parameters = read_parameters(parse("a: 1", "c.yaml"), [f"m.n={values}"])
    found = Search(parameters, Sweep(method="brute_force", trials=9, objective="valid/loss"), 0)
    tried = []
    while not found.is_exhausted:
        given, proposal = found.propose()
        one = experiment(tmp_path, given)
        found.begin(one, proposal)
        found.end(one, finished(1.0) if results == "finished" else [Result("failed")])
        tried.append(given["m.n"])
    assert len(set(tried)) == len(tried) == (2 if "[" in values else 3)
