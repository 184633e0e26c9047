"""The catalogue: everything that is listed works in a config as it is explained."""

import inspect
import textwrap

import pytest
import torch
from ruamel.yaml import YAML

from emrun import create_model
from emrun.config.catalogue import PLACES, explained, explanation, listing, with_defaults
from emrun.config.names import dotted_path, short_names

MODEL = {
    "module": {"class": "torch.nn.Linear", "in_features": 4, "out_features": 2},
    "inputs": ["x"],
    "outputs": ["logits"],
    "loss": {"class": "torch.nn.CrossEntropyLoss", "inputs": ["logits", "label"]},
    "optimizer": {"class": "SGD", "lr": 0.1, "momentum": 0.9},
}


def pasted(name):
    """Return the YAML of an explanation, read."""
    return YAML(typ="safe").load(textwrap.dedent(explanation(name).split("\n\n")[1]))


@pytest.mark.parametrize("kind", PLACES)
def test_every_kind_has_names_each_with_one_line(kind):
    rows = listing(kind)
    assert len(rows) == len(dict(rows)) > 0
    assert all(text and "\n" not in text for _, text in rows)


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


@pytest.mark.parametrize("name", [name for name, _ in listing("schedules")])
def test_the_yaml_of_a_schedule_makes_it(name, tmp_path, monkeypatch):
    (tmp_path / "my_module.py").write_text("def factor(epoch):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    model = create_model({"model": {**MODEL, **pasted(name)["model"]}, "dataset": {"class": "Digits"}})
    made = model.scheduler if name in OWN else model.scheduler.scheduler
    assert type(made).__name__ == name


@pytest.mark.parametrize("name", [name for name, _ in listing("metrics")])
def test_the_yaml_of_a_metric_makes_it(name):
    model = create_model({"model": {**MODEL, **pasted(name)["model"]}, "dataset": {"class": "Digits"}})
    outputs = model.run({"x": torch.zeros(3, 4), "label": torch.tensor([0, 1, 0])}, False, "valid")
    assert outputs[name.rpartition(".")[2]].shape == (3,)
    assert explanation(name) == explanation(name.rpartition(".")[2].upper())


def test_arguments_of_a_schedule_are_those_that_a_config_can_set():
    lines = explanation("reduce_lr_on_plateau").splitlines()
    names = [line.strip().partition(":")[0] for line in lines if line[:5].strip() and line[:4] == "    "]
    assert {"mode", "factor", "patience", "metric"} <= set(names)
    assert not {"optimizer", "last_epoch", "step_on"} & set(names)
    assert "    step_on: " in explanation("torch.optim.lr_scheduler.StepLR")


def test_what_neither_emrun_nor_torch_has_is_not_explained():
    assert explanation("Nothing") is None
    assert explanation("emrun.metrics.nothing") is None


def test_optimizers_are_all_of_torchs_that_a_config_can_use():
    found = {name for name, each in vars(torch.optim).items() if inspect.isclass(each)}
    assert {name for name, _ in listing("optimizers")} == found - {"Optimizer", "LBFGS"}


@pytest.mark.parametrize("name", [name for name, _ in listing("optimizers") if name != "Muon"])
def test_the_yaml_of_an_optimizer_makes_it(name):
    module = {"class": "torch.nn.Linear", "in_features": 4, "out_features": 2}
    model = create_model(
        {"model": {**MODEL, "module": module, **pasted(name)["model"]}, "dataset": {"class": "Digits"}}
    )
    assert type(model.optimizer).__name__ == name


def test_an_optimizer_is_explained_with_the_arguments_that_torch_describes_and_groups():
    lines = explanation("torch.optim.AdamW").splitlines()
    names = [line.strip().partition(":")[0] for line in lines if line[:5].strip() and line[:4] == "    "]
    assert names == ["model", "lr", "betas", "eps", "weight_decay", "amsgrad", "groups", "no_decay", "match"]
    assert "{_" not in explanation("AdamW")


def test_defaults_stand_beside_the_arguments_and_what_is_raised_is_left_out():
    text = explanation("SaveBest")
    assert "    model_name (default best): the name of the checkpoint." in text
    assert "    aggregation (default mean): " in text
    assert "Raises:" not in text
    assert '    delimiter (default ","): ' in explanation("WriteCSV")
    assert "output_dir" not in explanation("WriteCSV")


@pytest.mark.parametrize("kind", ["hooks", "datasets", "models", "schedules"])
def test_every_argument_of_a_built_in_is_described(kind):
    for name in [name for name, _ in listing(kind) if kind != "schedules" or name in OWN]:
        entries = explanation(name).partition("\nArgs:\n")[2].partition("\n\n")[0].splitlines()
        assert [entry for entry in entries if entry[4:5].strip() and ": " not in f"{entry} "] == []


def described(text, function):
    return with_defaults(text, inspect.signature(function).parameters)


def test_defaults_stand_beside_the_names_and_raises_is_left_out():
    text = (
        "Does.\n\nArgs:\n    a: the first,\n        in two lines.\n    b (int): the second.\n\nRaises:\n    No: no.\n"
    )
    assert described(text, lambda a, b=3: None) == (
        "Does.\n\nArgs:\n    a: the first,\n        in two lines.\n    b (default 3) (int): the second."
    )


def test_what_stands_behind_raises_is_kept():
    assert with_defaults("Does.\n\nRaises:\n    ValueError: no.\n\nSee elsewhere.", {}) == "Does.\n\nSee elsewhere."


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("best", " (default best)"),
        ("", ' (default "")'),
        ("null", ' (default "null")'),
        (True, " (default true)"),
        (1e-8, " (default 1e-08)"),
        ((0.9, 0.999), " (default [0.9, 0.999])"),
        (None, ""),
        (float("inf"), ""),
        (print, ""),
    ],
    ids=repr,
)
def test_a_default_is_written_as_yaml_if_that_is_possible(value, written):
    assert described("Does.\n\nArgs:\n    a: it.", lambda a=value: None) == f"Does.\n\nArgs:\n    a{written}: it."


def test_a_default_that_the_text_names_is_not_added():
    text = "Does.\n\nArgs:\n    a: it. Default: 3."
    assert described(text, lambda a=3: None) == text


def test_an_object_without_a_use_in_a_config_has_its_docstring_alone():
    assert explained("inspect.cleandoc", inspect.cleandoc) == inspect.getdoc(inspect.cleandoc)
