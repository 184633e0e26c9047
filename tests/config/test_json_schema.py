"""The JSON schema of configs: it knows all that emrun brings, finds what is wrong, and accepts what emrun accepts."""

import functools
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from campaign import thinned
from hypothesis import given, settings, strategies as st
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from emrun.base.errors import ConfigError, Position
from emrun.config.config import Config, read_config
from emrun.config.json_schema import config_schema, hint_schema
from emrun.config.names import SUPPLIED, short_names
from emrun.config.overrides import merge
from emrun.config.plan import Plan
from emrun.config.sections import SECTIONS
from emrun.config.source_finder import Unimported
from emrun.config.type_hints import mismatch
from emrun.config.yaml_tree import node_of

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "sample_configs").rglob("*.yaml"))
README = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
SOURCES = Unimported()
CONFIG = """\
seed: 1
name: digits
dataset: {class: Digits, batch_size: 32, flat: true}
model:
  module: {class: torch.nn.Linear, in_features: 64, out_features: 10}
  inputs: [image]
  outputs: [logits]
  loss: {class: torch.nn.CrossEntropyLoss, inputs: [logits, label]}
  metrics:
    accuracy: {import: emrun.metrics.accuracy, inputs: [logits, label]}
  optimizer: {class: AdamW, lr: 1.0e-3, betas: [0.9, 0.99]}
  scheduler: {class: StepLR, step_size: 3}
main_loop: {extra_streams: [valid], buffer: 2, on_empty_batch: warn}
hooks:
  - ComputeStats: {variables: [loss, {accuracy: [mean, std]}]}
  - LogVariables
  - SaveBest: {variable: accuracy, condition: max}
  - StopAfter: {epochs: 2}
eval:
  test: {hooks: [{ComputeStats: {variables: [loss]}}], dataset: {batch_size: 64}}
"""


@functools.cache
def schema():
    return config_schema()  # half a second: only where it is needed


@functools.cache
def validator():
    return Draft202012Validator(schema())


def read(text):
    return YAML(typ="safe").load(text)


def changed(path, value):
    """Return the config with another value at a path."""
    config = read(CONFIG)
    *above, last = path
    owner = config
    for part in above:
        owner = owner[part]
    owner[last] = value
    return config


def places(validator, value):
    """Return where a value is wrong."""
    return {tuple(error.absolute_path) for error in validator.iter_errors(value)}


@pytest.mark.parametrize("share", thinned([1, 10], [10]))
def test_the_schema_is_valid_and_can_be_written(share):
    parts = dict(list(schema()["$defs"].items())[::share])
    Draft202012Validator.check_schema({**schema(), "$defs": parts})
    assert json.loads(json.dumps(schema(), allow_nan=False)) == schema()


def test_every_reference_leads_somewhere():
    used = set(re.findall(r'"\$ref": "#/\$defs/([^"]+)"', json.dumps(schema())))
    assert used == set(schema()["$defs"])


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_the_samples_are_valid(path):
    validator().validate(read(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("text", README, ids=range(len(README)))
def test_the_configs_of_the_readme_are_valid(text):
    assert {"dataset", "model"} <= read(text).keys()
    validator().validate(read(text))


def test_the_config_of_these_tests_is_valid():
    validator().validate(read(CONFIG))
    Plan.with_evaluations(read_config(read(CONFIG)), SOURCES)


def test_every_section_is_described():
    assert list(schema()["properties"]) == ["extends", *SECTIONS]
    assert all(each.get("description") for each in schema()["properties"].values())


@pytest.mark.parametrize("kind", ["hook", "dataset", "model"])
def test_every_built_in_is_there_with_all_its_arguments_explained(kind):
    for name in short_names(kind):
        check_built_in(kind, name)


def check_built_in(kind, name):
    import emrun.config.recipe
    from emrun.config.names import dotted_path

    target = emrun.config.import_finder.locate(dotted_path(name, kind))
    arguments = set(inspect.signature(target).parameters) - set(SUPPLIED[kind])
    properties = schema()["$defs"][f"{kind}.{name}"]["properties"]
    assert properties.keys() - {"class", "args"} == arguments
    assert all(properties[argument].get("description") for argument in arguments)
    for argument in arguments:
        default = inspect.signature(target).parameters[argument].default
        if default not in (None, inspect.Parameter.empty):
            assert properties[argument]["default"] == (list(default) if isinstance(default, tuple) else default)
    names = (
        schema()["$defs"]["hook"]["properties"] if kind == "hook" else json.dumps(schema()["$defs"][kind]["properties"])
    )
    assert name in names


@pytest.mark.parametrize(
    ("package", "base", "keys"),
    [
        (torch.optim, torch.optim.Optimizer, ["groups", "no_decay", "match"]),
        (torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler, ["step_on", "metric", "warmup"]),
    ],
    ids=["optimizer", "scheduler"],
)
def test_every_optimizer_and_scheduler_is_there_with_all_its_arguments(package, base, keys):
    classes = {
        name: each
        for name, each in vars(package).items()
        if inspect.isclass(each) and issubclass(each, base) and each is not base and not name.startswith("_")
    }
    form = f"form.{'-'.join((package.__name__, *keys))}"
    suggested = schema()["$defs"][form]["properties"]["class"]["anyOf"][0]["enum"]
    suggested = [
        each
        for each in suggested
        if f"emrun.models.schedules.built_in.{each}-step_on-metric-warmup" not in schema()["$defs"]
    ]
    assert set(suggested) == {name for name, each in classes.items() if each.__module__.startswith(package.__name__)}
    for name in suggested:
        properties = schema()["$defs"]["-".join((f"{package.__name__}.{name}", *keys))]["properties"]
        arguments = [
            each for each in inspect.signature(classes[name]).parameters if each not in ("params", "optimizer")
        ]
        assert properties.keys() == {*arguments, *keys, "class", "args"}


@pytest.mark.parametrize(
    ("scheduler", "fits"),
    [
        ({"class": "Cosine", "warmup": "5%", "final": 0.1}, True),
        ({"class": "Steps", "milestones": ["50%", "500 updates"]}, True),
        ({"class": "Cosine", "warmpu": "5%"}, False),
        ({"class": "ChainedScheduler", "schedulers": [{"class": "ExponentialLR", "gamma": 0.9}]}, True),
        ({"class": "ReduceLROnPlateau", "metric": "valid/loss", "warmup": "5%"}, True),
        ({"class": "ChainedScheduler", "schedulers": [{"class": "ExponentialLR", "warmup": "5%"}]}, False),
    ],
)
def test_schedules_of_emrun_are_completed_and_checked(scheduler, fits):
    form = schema()["$defs"]["form.torch.optim.lr_scheduler-step_on-metric-warmup"]
    form = form["properties"]["class"]["anyOf"][0]["enum"]
    assert {"Cosine", "CosineAnnealingLR"} <= set(form)
    assert validator().is_valid(changed(("model", "scheduler"), scheduler)) is fits


def test_the_main_loop_has_all_its_arguments():
    from emrun import MainLoop

    properties = schema()["$defs"]["main_loop"]["properties"]
    arguments = set(inspect.signature(MainLoop).parameters)
    assert properties.keys() == arguments - {"model", "dataset", "hooks", "run", "rank_log", "seed", "unknown"}
    assert all(each["description"] for each in properties.values())


WRONG = [
    (("modle",), {}, ()),
    (("seed",), "one", ("seed",)),
    (("seed",), True, ("seed",)),
    (("seed",), -1, ("seed",)),
    (("deterministic",), 1, ("deterministic",)),
    (("name",), 3, ("name",)),
    (("dataset",), None, ("dataset",)),
    (("dataset",), ["Digits"], ("dataset",)),
    (("dataset",), {"batch_size": 3}, ("dataset",)),
    (("dataset", "batchsize"), 3, ("dataset",)),
    (("dataset", "batch_size"), 1.5, ("dataset", "batch_size")),
    (("dataset", "output_dir"), "here", ("dataset",)),
    (("model", "modul"), {}, ("model",)),
    (("model", "module"), "torch.nn.Linear", ("model", "module")),
    (("model", "module", "class"), "Linaer", ("model", "module", "class")),
    (("model", "device"), 0, ("model", "device")),
    (("model", "optimizer", "learning_rate"), 0.1, ("model", "optimizer")),
    (("model", "optimizer", "lr"), "fast", ("model", "optimizer", "lr")),
    (("model", "optimizer", "betas"), [0.9], ("model", "optimizer", "betas")),
    (("model", "optimizer", "betas", 0), "x", ("model", "optimizer", "betas", 0)),
    (("model", "optimizer"), "AdamW", ("model", "optimizer")),
    (("model", "scheduler", "step_size"), "3", ("model", "scheduler", "step_size")),
    (
        ("model", "scheduler"),
        {"class": "ChainedScheduler", "schedulers": [{"class": "StepLR", "step_size": 3, "step_on": "epoch"}]},
        ("model", "scheduler", "schedulers", 0),
    ),
    (
        ("model", "scheduler"),
        {
            "class": "SequentialLR",
            "schedulers": [{"class": "ChainedScheduler", "schedulers": [{"class": "ConstantLR", "factr": 0.5}]}],
            "milestones": [],
        },
        ("model", "scheduler", "schedulers", 0, "schedulers", 0),
    ),
    (
        ("model", "scheduler"),
        {"class": "ChainedScheduler", "schedulers": [], "optimizer": None},
        ("model", "scheduler"),
    ),
    (("main_loop", "bufer"), 3, ("main_loop",)),
    (("main_loop", "buffer"), "3", ("main_loop", "buffer")),
    (("main_loop", "on_empty_batch"), "wran", ("main_loop", "on_empty_batch")),
    (("main_loop", "extra_streams", 0), 3, ("main_loop", "extra_streams", 0)),
    (("hooks",), {"StopAfter": {}}, ("hooks",)),
    (("hooks", 0), 3, ("hooks", 0)),
    (("hooks", 0), {}, ("hooks", 0)),
    (("hooks", 0), {"StopAfter": {"epochs": 3}, "LogVariables": {}}, ("hooks", 0)),
    (("hooks", 0), {"my_hooks.Mine": 3}, ("hooks", 0, "my_hooks.Mine")),
    (("hooks", 3, "StopAfter", "epoch"), 3, ("hooks", 3, "StopAfter")),
    (("hooks", 3, "StopAfter", "epochs"), "three", ("hooks", 3, "StopAfter", "epochs")),
    (("hooks", 2, "SaveBest", "condition"), "best", ("hooks", 2, "SaveBest", "condition")),
    (("eval", "test", "name"), "x", ("eval", "test")),
    (("eval", "test"), 3, ("eval", "test")),
    (("eval", "test", "dataset"), {"class": "Digits", "batchsize": 3}, ("eval", "test", "dataset")),
    (("eval", "test", "hooks", 0), {"StopAfter": {"epoch": 3}}, ("eval", "test", "hooks", 0, "StopAfter")),
]


@pytest.mark.parametrize(
    ("path", "value", "place"),
    thinned(WRONG, WRONG[::3]),
    ids=[f"{'.'.join(map(str, w[0]))}={w[1]}" for w in WRONG],
)
def test_a_mistake_is_found_at_its_place_and_emrun_refuses_it_too(path, value, place):
    config = changed(path, value)
    assert places(validator(), config) == {place}
    with pytest.raises(ConfigError):
        Plan.with_evaluations(read_config(config), SOURCES)


FOR_THE_CHECK = [
    (("model", "inputs"), {"input": 3}),
    (("model", "optimizer"), {"lr": 0.1}),
    (("model", "scheduler"), {"class": "StepLR"}),
    (("model", "loss"), {"one": {"inputs": ["logits"]}}),
    (("model", "metrics", "accuracy"), "emrun.metrics.accuracy"),
    (("hooks", 0), {"Check": None}),
    (("hooks", 0), {"Check": {"variable": "loss"}}),
    (("hooks", 3, "StopAfter", "epochs"), {"a": 3}),
]


@pytest.mark.parametrize(
    ("path", "value"), FOR_THE_CHECK, ids=[f"{'.'.join(map(str, a[0]))}={a[1]}" for a in FOR_THE_CHECK]
)
def test_a_missing_part_that_a_base_config_may_have_is_refused_only_by_the_check(path, value):
    config = changed(path, value)
    validator().validate(config)
    with pytest.raises(ConfigError):
        Plan.with_evaluations(read_config(config), SOURCES)


@pytest.mark.parametrize("section", ["dataset", "model"])
def test_a_config_needs_a_dataset_and_a_model_unless_it_extends_another(section):
    config = read(CONFIG)
    del config[section]
    assert places(validator(), config) == {()}
    assert places(validator(), {**config, "extends": None}) == {()}
    validator().validate({**config, "extends": "base.yaml"})
    validator().validate({**config, "extends": ["base.yaml", "other.yaml"]})


def test_a_config_with_extends_may_be_incomplete_but_not_wrong():
    over = {"extends": "base.yaml", "dataset": {"batch_size": 3}, "model": {"optimizer": {"lr": 0.1}}}
    validator().validate(over)
    validator().validate(
        {"extends": "base.yaml", "main_loop": {"more": 3}}
    )  # base.yaml may say on_incorrect_config: warn
    over["dataset"] = {"class": "Digits", "batch_size": "many", "flt": True}
    assert places(validator(), over) == {("dataset",), ("dataset", "batch_size")}


ACCEPTED = [
    (("dataset",), {"class": "my_data.Mine", "anything": [1]}),
    (("dataset",), {"class": "digits"}),
    (("dataset",), {"class": "Digits", "args": [3]}),
    (("dataset", "batch_size"), "${seed}"),
    (("dataset", "batch_size"), {"class": "builtins.int", "args": [3]}),
    (("dataset",), "${eval.test.dataset}"),
    (("model", "class"), "TorchModel"),
    (("model",), {"class": "my_model.Mine", "module": 3}),
    (("model", "module"), {"class": "a.B", "args": [{"class": "a.C"}], "depth": {"class": "a.D"}}),
    (("model", "optimizer"), {"class": "my.Own", "x": 3, "groups": []}),
    (("model", "optimizer", "groups"), [{"match": "bias", "lr": 0.1}]),
    (("model", "optimizer"), None),
    (("model", "scheduler"), {"class": "StepLR", "args": [3], "step_on": "update"}),
    (("model", "scheduler", "metric"), "valid/loss/mean"),
    (
        ("model", "scheduler"),
        {
            "class": "SequentialLR",
            "schedulers": [
                {"class": "ChainedScheduler", "schedulers": [{"class": "constantlr"}, {"class": "my.Own", "x": 3}]},
                {"class": "LambdaLR", "lr_lambda": {"import": "my.curve"}},
            ],
            "milestones": [3],
            "step_on": "update",
        },
    ),
    (("model", "loss"), {"a": {"class": "a.B", "inputs": ["x"], "scale": 0.1}, "b": {"import": "a.b"}}),
    (("model", "inputs"), {"x": "image"}),
    (("model", "inputs"), {"x": {"source": "image", "dtype": "uint8"}, "y": {"dtype": "keep"}}),
    (("model", "inputs"), {"x": {"dtype": {"import": "torch.uint8"}}}),
    (("main_loop",), None),
    (("main_loop",), {"on_incorrect_config": "warn", "older": 3}),
    (("main_loop", "extra_streams"), ["valid", {"test": "5 epochs"}]),
    (("hooks",), None),
    (("hooks", 0), "my_hooks.Mine"),
    (("hooks", 0), "compute_stats"),
    (("hooks", 0), {"my_hooks.Mine": {"anything": 1}}),
    (("hooks", 0), {"LogVariables": None}),
    (("hooks", 0), {"ComputeStats": {"args": [["loss"]]}}),
    (("eval",), {"valid": None, "test": {"seed": 3}}),
    (("seed",), None),
]


@pytest.mark.parametrize(
    ("path", "value"),
    thinned(ACCEPTED, ACCEPTED[::3]),
    ids=[f"{'.'.join(map(str, a[0]))}={a[1]}" for a in ACCEPTED],
)
def test_every_form_of_a_config_is_valid(path, value):
    validator().validate(changed(path, value))


HINTS = [
    None, Any, int, float, complex, bool, str, type(None), object, list, tuple, dict, int | None, int | float | str,
    list[int], tuple[int, int], tuple[float, ...], tuple[float | None, float], set[int], Sequence[str], Iterable[str],
    Sequence[str | Mapping[str, Sequence[str]]], Mapping[str, int], dict[str, list[float]], Path, Literal["min", "max"],
    Literal[1, None], Literal["a"] | int, float | torch.Tensor, torch.Tensor, torch.nn.Module, torch.device,
    Annotated[int, "x"], Callable[[], int], list[int] | list[str], list[int] | dict[str, int], int | list[int],
    Mapping[str, int] | torch.Tensor, Sequence[str] | Mapping[str, str] | None, Literal[b"a"], list[list[int]],
]  # fmt: skip
VALUES = [
    None, True, 0, 1, 2, 1.5, "a", "min", "${a}", [], {}, [1], [1, 2], [1, 2, 3], ["a"], [["a"]], [[1]], [None, 0.5],
    {"a": 1}, {"a": "b"}, {"a": [1.5]}, [{"a": ["b"]}], [{"a": 1}], {"class": "a.B"}, {"import": "a.b"},
    [{"class": "a.B", "x": 1}], {"a": {"class": "a.B"}}, {"class": "a.B", "args": [1], "x": "y"},
]  # fmt: skip


def validator_of(hint, default=inspect.Parameter.empty):
    parameter = inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)
    return Draft202012Validator({**hint_schema(parameter), "$defs": schema()["$defs"]})


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_the_schema_of_a_type_hint_allows_what_the_check_allows_and_parts_of_forms(hint):
    validator = validator_of(hint)
    for value in VALUES:
        right = value == "${a}" or mismatch(node_of(value, Position("c.yaml")), hint) is None
        if right or "{" not in str(value):
            assert validator.is_valid(value) is right, value


def test_a_hint_that_contradicts_its_default_is_ignored():
    assert validator_of(int, default=None).is_valid("x")
    assert not validator_of(int, default=3).is_valid("x")


def paths(value, path=()):
    """Yield the path of every value in a config but the whole."""
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from paths(child, (*path, key))


PLACES = list(paths(read(CONFIG)))
KEYS = st.sampled_from(
    ["class", "args", "lr", "x", "import", "groups", "inputs", "epochs", "flat", "variables", "valid"]
)
LEAVES = st.sampled_from(
    [None, True, 0, 3, 0.5, "a", "max", "loss", "Digits", "AdamW", "SGD", "torch.nn.ReLU", "${seed}"]
)
RANDOM = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=4
)


def is_accepted(config):
    """Tell whether the check accepts a config; a form in `main_loop`, which is not built, the loop refuses later."""
    if re.search(r"'(class|import)'", str([config.get("main_loop"), config.get("eval", "test", "main_loop")])):
        return False
    try:
        Plan.with_evaluations(Config(config, "c"), SOURCES)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("count", thinned([5, 50], [5]))
def test_what_the_check_accepts_is_valid(count):
    @settings(max_examples=count, deadline=None)
    @given(st.sampled_from(PLACES), RANDOM, st.none() | KEYS)
    def check(path, value, key):
        config = (
            changed(path, value)
            if key is None
            else changed((*path[:-1], key) if isinstance(path[-1], str) else path, value)
        )
        if is_accepted(node_of(config, Position("c.yaml"))):
            validator().validate(config)

    check()


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(PLACES), RANDOM, st.booleans())
def test_what_the_check_accepts_merged_over_another_config_or_for_a_stream_is_valid(path, value, is_for_stream):
    over = value
    for part in reversed(path):
        if not isinstance(part, str):
            return
        over = {part: over}
    base = node_of(read(CONFIG), Position("c.yaml"))
    if is_for_stream:
        config = {**read(CONFIG), "eval": {"test": over}}
        if is_accepted(node_of(config, Position("c.yaml"))):
            validator().validate(config)
    elif is_accepted(merge(base, node_of(over, Position("over.yaml")))):
        validator().validate({**over, "extends": "c.yaml"})


@pytest.mark.campaign
def test_writing_the_schema_imports_neither_torch_nor_the_described_classes():
    code = (
        "import sys, emrun.config.json_schema; emrun.config.json_schema.config_schema()\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'sklearn')]\n"
        "assert not [m for m in sys.modules if m.startswith(('emrun.hooks', 'emrun.datasets', 'emrun.models.'))]"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
