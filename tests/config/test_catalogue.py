"""The catalogue: names by kind, each with its docstring."""

import inspect

import pytest
import torch

from emrun import metrics
from emrun.config.catalogue import PLACES, argument_texts, explained, explanation, listing
from emrun.config.import_finder import Imported, locate
from emrun.config.names import SUPPLIED, dotted_path, short_names


@pytest.mark.parametrize("kind", PLACES)
def test_every_kind_has_names_each_with_one_line(kind):
    rows = listing(kind)
    assert len(rows) == len(dict(rows)) > 0
    assert all((text or kind in ("optimizers", "schedules")) and "\n" not in text for _, text in rows)


def test_hooks_datasets_and_models_are_those_that_a_config_finds_by_their_short_names():
    for kind, one in (("hooks", "hook"), ("datasets", "dataset"), ("models", "model")):
        names = [name for name, _ in listing(kind)]
        assert set(short_names(one)) - set(names) <= {"DownloadableDataset"}
        assert all(dotted_path(name, one) for name in names)
        assert all(name in explanation(name.lower()) or kind == "models" for name in names)


OWN = {"Constant", "Linear", "Cosine", "Polynomial", "Exponential", "InverseSqrt", "Steps"}


def test_schedules_are_emruns_and_all_of_torchs():
    classes = [each for each in vars(torch.optim.lr_scheduler).values() if inspect.isclass(each)]
    base = torch.optim.lr_scheduler.LRScheduler
    found = {each.__name__ for each in classes if issubclass(each, base) and each.__module__ == base.__module__}
    assert {name for name, _ in listing("schedules")} == OWN | (
        {name for name in found if name[0] != "_"} - {"LRScheduler"}
    )


def test_what_neither_emrun_nor_torch_has_is_not_explained():
    assert explanation("Nothing") is None
    assert explanation("emrun.metrics.nothing") is None


def test_optimizers_are_all_of_torchs_that_a_config_can_use():
    found = {name for name, each in vars(torch.optim).items() if inspect.isclass(each)}
    assert {name for name, _ in listing("optimizers")} == found - {"Optimizer", "LBFGS"}


@pytest.mark.parametrize("name", ["SaveBest", "save_best"])
def test_an_explanation_is_the_docstring(name):
    from emrun.hooks import SaveBest

    assert explanation(name) == inspect.getdoc(SaveBest)
    assert explanation("emrun.metrics.top_k") == explanation("TOP_K") == inspect.getdoc(metrics.top_k)


@pytest.mark.parametrize("name", ["AdamW", "torch.optim.AdamW", "steplr"])
def test_a_class_of_torch_is_explained_by_torch(name):
    assert "is a class of PyTorch for model." in explanation(name)
    assert explanation(name).endswith(("/torch.optim.AdamW.html", "/torch.optim.lr_scheduler.StepLR.html"))


def test_an_object_without_a_docstring_says_so():
    assert explained("mine.f", lambda: None) == "mine.f has no docstring"


@pytest.mark.parametrize("kind", ["hook", "dataset"])
def test_every_argument_of_a_built_in_is_described(kind):
    for name in short_names(kind):
        found = locate(dotted_path(name, kind))
        named = Imported().parameters(found).named
        assert [each for each in named if each not in (*SUPPLIED[kind], *argument_texts(found))] == []
