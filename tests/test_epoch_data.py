"""What hooks say that they read and write, and where it is found in the data of an epoch."""

import copy
import importlib
import math
import pickle
import re
import sys
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from textwrap import dedent

import numpy as np
import pytest
import torch
from doubles import LossOfOne, Numbers, Streams, run_numbers as run
from projects import linear_with

from emrun import AbstractHook, MainLoop, create_training
from emrun.base.errors import ConfigError, HookError, StreamError
from emrun.base.types import EpochVariable
from emrun.epoch_data import as_float, check_monitors, check_numbers, number_at, read_by, statistics
from emrun.hooks import ComputeStats, WriteCSV
from emrun.record.rows import as_floats
from emrun.storage.run import Run


class Writes(AbstractHook):
    def __init__(self, *names):
        super().__init__()
        self.writes = names

    def after_epoch(self, epoch_data):
        for variables in epoch_data.values():
            variables.update({name.partition("/")[0]: 1.0 for name in self.writes})


class Monitors(AbstractHook):
    def __init__(self, *addresses):
        super().__init__()
        self.monitors = addresses


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("loss/mean", "valid/loss/mean"),
        ("loss/mean", "valid/loss"),
        ("loss", "valid/loss/mean"),  # a mapping whose aggregations are not known
        ("loss", "valid/loss"),
        ("a/b", "train/a/b"),
        ("loss", "loss"),  # in whatever stream
        ("loss/std", "loss"),
        ("a/b/mean", "a/b"),  # a variable with a slash in its name
    ],
)
def test_what_an_earlier_hook_writes_may_be_monitored(written, address):
    check_monitors([Writes("other"), Writes(written), Monitors(address)], ["train", "valid"])


@pytest.mark.parametrize("address", ["learning_rate", "train/learning_rate", "train/learning_rate_1"])
def test_the_learning_rate_of_the_train_stream_may_be_monitored(address):
    check_monitors([Monitors(address)], ["train", "valid"])


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([AbstractHook(), Monitors("valid/learning_rate")], "no hook writes 'learning_rate'"),
        ([Writes("loss/mean"), Monitors("valid/los/mean")], "but no hook writes 'los/mean'; did you mean 'loss/mean'?"),
        ([Writes("loss/mean"), Monitors("valid/loss/std")], "no hook writes 'loss/std'"),
        (
            [AbstractHook(), Monitors("valid/loss")],
            "(hooks write nothing); add it to ComputeStats (variables: [loss]), or declare",
        ),
        ([AbstractHook(), Monitors("loss")], "monitors loss, but no hook writes 'loss' (hooks write nothing)"),
        (
            [Writes("loss/mean"), Monitors("lsos")],
            "did you mean 'loss'? (hooks write loss); add it to ComputeStats, or",
        ),
        ([Writes(*(f"f1/{n}" for n in range(50))), Monitors("valid/f1/cat")], "(hooks write f1); add it to"),
        ([Writes("loss"), Monitors("lsos")], "declare `writes = ['lsos']` in the hook of yours that writes it"),
        ([AbstractHook(), Monitors("loss"), Writes("loss/std")], "monitors loss, which Writes writes later; move this"),
        ([Writes("loss"), Monitors("vaild/loss")], "stream 'vaild' is not run; did you mean 'valid'? (the main loop"),
        ([AbstractHook(), Monitors("valid/loss"), Writes("loss")], "move this hook after Writes"),
    ],
)
def test_what_is_not_written_before_is_an_error(hooks, message):
    with pytest.raises(HookError, match=re.escape(message)) as caught:
        check_monitors(hooks, ["train", "valid"])
    assert caught.value.hook_index == 1
    assert str(caught.value).startswith("Monitors monitors ")


@pytest.mark.parametrize(
    ("streams", "fix"), [(["train"], "override main_loop.extra_streams=[valid]"), (["train", "train_eval", "test"], "")]
)
def test_a_stream_that_is_not_run_has_a_fix_unless_that_would_change_other_entries(streams, fix):
    with pytest.raises(HookError, match="stream 'valid' is not run") as caught:
        check_monitors([Writes("loss"), Monitors("valid/loss")], streams)
    assert caught.value.fix == fix


MODULE = """
from __future__ import annotations
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from emrun import AbstractHook
from emrun.base.types import Address, EpochVariable, VariableName

if TYPE_CHECKING:
    from nowhere import Nothing

class Reads(AbstractHook):
    def __init__(
        self, things: Sequence[VariableName] = (), *more: VariableName, epoch: EpochVariable | None = None,
        weights: Mapping[VariableName, float] | None = None, stop: Nothing | None = None,
        pair: tuple[Address, int] | Address | None = None, any: str = "loss",
    ):
        super().__init__()

class HandsOn(Reads):
    def __init__(self, own: EpochVariable, **options):
        super().__init__(**options)

class ByDefault(AbstractHook):
    def __init__(self, variable: EpochVariable = "loss"):
        super().__init__()

class Silent(Reads):
    __init__ = 3
"""


@pytest.fixture
def named(tmp_path, monkeypatch):
    """Return the module of hooks whose arguments name what they read."""
    (tmp_path / "named_hooks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "named_hooks", raising=False)
    yield importlib.import_module("named_hooks")
    sys.modules.pop("named_hooks", None)


def test_variables_of_a_batch_are_read_wherever_they_stand_in_the_arguments(named):
    assert read_by(named.Reads(["a", "b"])) == ("a", "b")
    assert read_by(named.Reads(("a",), "c", "d")) == ("a", "c", "d")
    assert read_by(named.Reads(things=["a"], weights={"b": 0.5, "a": 1})) == ("a", "b")
    assert read_by(named.Reads(any="x", epoch="y")) is None


def test_arguments_that_are_handed_on_to_a_base_count(named):
    assert read_by(named.HandsOn("y", things=["a"])) == ("a",)


def test_what_a_hook_sets_itself_counts_beside_its_arguments(named):
    hook = named.Reads(["a"])
    hook.reads = ["b", "a"]
    assert read_by(hook) == ("a", "b")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))])
def test_a_copy_of_a_hook_reads_the_same(named, duplicate):
    assert read_by(duplicate(named.Reads(["a"]))) == ("a",)


def test_a_hook_that_is_built_without_its_constructor_names_nothing(named):
    assert read_by(named.Reads.__new__(named.Reads)) is None
    assert read_by(object.__new__(named.Reads)) is None
    with pytest.raises(TypeError, match=r"not callable"):
        named.Silent()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epoch": "lsos"}, "Reads monitors lsos, but no hook writes 'lsos'; did you mean 'loss'?"),
        ({"pair": "valid/loss/std"}, "Reads monitors valid/loss/std, but no hook writes 'loss/std'"),
        ({"pair": ("vaild/loss/mean", 3)}, "Reads monitors vaild/loss/mean, but stream 'vaild' is not run"),
    ],
)
def test_a_statistic_that_an_argument_names_is_checked_before_the_training(named, arguments, message):
    hook = named.Reads(**arguments)
    with pytest.raises(HookError, match=re.escape(message)):
        run(ComputeStats(["loss"]), hook, extra_streams=["valid"])
    run(ComputeStats(["loss"]), named.Reads(epoch="loss", pair=["valid/loss/mean", 3]), extra_streams=["valid"])


def test_a_default_that_names_a_variable_counts(named):
    with pytest.raises(HookError, match=r"ByDefault monitors loss, but no hook writes 'loss'"):
        run(named.ByDefault())


def test_a_variable_that_an_argument_names_is_checked_with_the_first_batch(named):
    with pytest.raises(StreamError, match=r"hook HandsOn reads 'los', which is neither a source nor an output; did yo"):
        run(ComputeStats(["loss"]), named.HandsOn("loss", things=["los"]))


def test_names_in_a_config_are_checked_at_the_line_of_their_hook(named):
    config = linear_with([{"ComputeStats": {"variables": ["loss"]}}, {"named_hooks.HandsOn": {"own": "lsos"}}])
    with pytest.raises(ConfigError, match=r"hooks\[1\].named_hooks.HandsOn: HandsOn monitors lsos, but no hook writes"):
        create_training(config)


def test_a_value_of_another_type_than_a_name_is_found_without_an_import(named):
    from emrun.config.config import load_config
    from emrun.config.plan import check_statically

    config = linear_with([{"named_hooks.HandsOn": {"own": 3}}, {"StopOnNaN": {"variables": 7}}])
    with pytest.raises(ConfigError) as caught:
        check_statically(load_config(config))
    assert [problem.key for problem in caught.value.problems] == [
        "hooks[0].named_hooks.HandsOn.own",
        "hooks[1].StopOnNaN.variables",
    ]


@pytest.mark.parametrize("attribute", ["reads", "writes", "monitors"])
def test_a_text_instead_of_a_list_of_names_is_an_error(attribute):
    hook = AbstractHook()
    setattr(hook, attribute, "loss")
    with pytest.raises(HookError, match=rf"{attribute} must be a list of names such as \['loss'\], not 'loss'"):
        run(hook)


class LogLoss(AbstractHook):
    def __init__(self, variable: EpochVariable):
        super().__init__()

    def before_training(self):
        raise AssertionError("it has begun")


def test_an_epoch_by_hand_begins_with_the_check():
    loop = MainLoop(LossOfOne(), Numbers(), [ComputeStats(["loss"]), LogLoss("lsos")])
    with pytest.raises(HookError, match=r"LogLoss monitors lsos"), loop:
        raise AssertionError("it has begun")
    with pytest.raises(HookError, match=r"LogLoss monitors lsos"):
        loop.run_evaluation("valid")


def test_an_evaluation_does_not_ask_for_streams_that_it_does_not_run():
    class Model(LossOfOne):
        monitors = ("train/other/mean",)

    loop = MainLoop(Model(), Numbers(), [ComputeStats(["loss"]), Monitors("train/loss/mean", "loss")])
    assert loop.run_evaluation("valid")["valid"]["loss"] == {"mean": 1.0}


def test_a_model_may_monitor_what_hooks_write():
    class Model(LossOfOne):
        monitors = ("train/loss/mean",)

    run(ComputeStats(["loss"]), model=Model())
    with pytest.raises(HookError, match=r"Model monitors train/loss/mean, but no hook writes"):
        run(model=Model())


def test_a_hook_of_ones_own_may_write_what_another_monitors(tmp_path, monkeypatch):
    (tmp_path / "score_hooks.py").write_text(
        dedent("""
            from emrun import AbstractHook

            class Score(AbstractHook):
                writes = ("score",)

                def after_epoch(self, epoch_id, epoch_data):
                    epoch_data["valid"]["score"] = float(epoch_id)
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    best = {"SaveBest": {"variable": "score", "aggregation": None, "condition": "max"}}
    training = create_training(
        linear_with([{"score_hooks.Score": None}, best, {"StopAfter": {"epochs": 2}}]), output_root=tmp_path / "log"
    )
    training.main_loop.run_training()
    checkpoints = training.output_dir / "checkpoints"
    assert (checkpoints / "best").resolve() == (checkpoints / "latest").resolve()


def test_a_mean_goes_by_the_name_of_its_variable():
    variables = {"loss": {"mean": 0.5, "std": 0.1}, "seconds": 3, "none": {}}
    assert list(statistics(variables)) == [("loss", 0.5), ("loss/std", 0.1), ("seconds", 3)]


def test_a_statistic_without_its_stream_is_explained():
    class Watches(AbstractHook):
        monitors = ("loss/mean",)

    message = r"but a statistic is written STREAM/VARIABLE/AGGREGATION: valid/loss/mean"
    with pytest.raises(HookError, match=message):
        check_monitors([ComputeStats(["loss"]), Watches()], ["train", "valid"])


def test_a_stream_that_is_not_there_is_told_with_those_that_are():
    class Val(AbstractHook):
        def after_epoch(self, epoch_data):
            assert epoch_data.get("val") is None
            epoch_data["val"]["loss"] = 1.0

    with pytest.raises(KeyError, match=r"there is no stream 'val' in the data of the epoch.*it has train"):
        run(Val())


# Numbers of any type: what watches them and what records them read the same


class Money:
    """A number of a class of its own."""

    def __float__(self):
        return 0.5


class Size(IntEnum):
    """A number with a name."""

    half = 2


NUMBERS = [
    *(0.5, np.float64(0.5), np.float32(0.5), np.float16(0.5), np.longdouble(0.5), np.array(0.5), np.array([0.5])),
    *(torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]], dtype=torch.bfloat16)),
    torch.nn.Parameter(torch.tensor(0.5)),
    *(np.array([[[0.5]]], ">f4"), np.array([Fraction(1, 2)], object), Fraction(1, 2), Decimal("0.5"), Money()),
    *(True, False, np.bool_(True), torch.tensor(True), 2, np.int8(2)),
    *(np.uint64(2**64 - 1), 2**63 + 1, -(2**70), 10**400),
    *(Size.half, torch.tensor([2], dtype=torch.uint8), math.nan, -math.inf, Decimal("NaN"), Decimal("-Infinity")),
]  # fmt: skip


class Color(Enum):
    """What is not a number."""

    red = 1


class Best(AbstractHook):
    """Notes what a hook that watches a statistic reads."""

    monitors = ("valid/score",)

    def after_epoch(self, epoch_data):
        self.read = number_at(epoch_data, "valid/score", "Best")


class Write(AbstractHook):
    """Writes a statistic."""

    writes = ("score",)

    def __init__(self, value):
        super().__init__()
        self.value = value

    def after_epoch(self, epoch_data):
        epoch_data["valid"]["score"] = self.value


def recorded(directory, value, *hooks):
    directory.mkdir(exist_ok=True)
    data = Streams(valid=[{"x": [1.0]}])
    with MainLoop(LossOfOne(), data, [Write(value), *hooks], run=Run(directory), on_unused_sources="ignore") as loop:
        loop.epoch([], ["valid"])
    return loop.metrics[0]["streams"]["valid"]


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: f"{type(value).__name__} {value!s:.20}")
def test_what_is_watched_is_what_is_recorded(tmp_path, value):
    best = Best()
    kept = recorded(tmp_path, value, best, WriteCSV(output_dir=tmp_path))["score"]
    assert np.array_equal(as_float(as_floats(kept)), best.read, equal_nan=True)
    assert kept == int(value) if isinstance(value, int) else type(kept) in (int, float, str)
    assert (tmp_path / "training.csv").read_text().splitlines()[1] == f"0,{as_floats(kept)!r}"


BIG = Fraction(10**400, 3)


@pytest.mark.parametrize(
    "value",
    [1j, complex(1), np.complex64(1), np.array([1j]), torch.tensor(1j), *map(Decimal, ("1e400", "sNaN")), BIG],
    ids=lambda value: f"{type(value).__name__} {value!s:.20}",
)  # fmt: skip
def test_a_number_that_no_float_can_have_is_refused_with_who_wrote_it(tmp_path, value):
    with pytest.raises(HookError, match=r"Write wrote valid/score, which is a number that no float can have; wr"):
        recorded(tmp_path, value)
    with pytest.raises(HookError, match="Write wrote valid/score, which is"):
        recorded(tmp_path / "again", {"mean": value})


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({1: 0.5}, "1"),
        ({None: 0.5}, "None"),
        ({(1, 2): 0.5}, r"\(1, 2\)"),
        ({1: 0.5, "1": 0.7}, "1"),
        ({"a": {1: 0.5, "1": 0.7}}, "a/1"),
        ({"a": {"b": 0.5}, "a/b": 0.7}, "a/b"),
        ({1: {"mean": 0.5}}, "1"),
    ],
)
def test_a_number_without_a_name_of_its_own_is_refused_with_who_wrote_it(values, name):
    with pytest.raises(HookError, match=rf"Write wrote valid/{name}, but .* is not a text, or the name of two"):
        check_numbers({"valid": values}, "Write")


def test_keys_of_a_mapping_may_be_numbers(tmp_path):
    assert recorded(tmp_path, {0: 0.5, 1: 0.7})["score"] == {"0": 0.5, "1": 0.7}


@pytest.mark.parametrize("value", [np.timedelta64(5, "s"), np.timedelta64(5, "ns"), np.array([5], "M8[ns]")])
def test_a_time_is_not_a_number(tmp_path, value):
    assert "score" not in recorded(tmp_path, value)


def test_a_number_of_the_model_that_no_float_can_have_is_refused():
    class Model(LossOfOne):
        def stream_values(self, name):
            return {"score": 1j}

    with pytest.raises(HookError, match="model Model wrote valid/score, which is a number"):
        MainLoop(Model(), Streams(valid=[{"x": [1.0]}]), on_unused_sources="ignore").run_evaluation("valid")


@pytest.mark.parametrize("value", ["0.5", b"0.5", np.str_("0.5"), [0.5], np.ones(2), torch.ones(2), None, Color.red],
                         ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_is_not_a_number_is_for_later_hooks_and_the_log_says_that_it_is_not_recorded(tmp_path, value, caplog):
    caplog.set_level("INFO")
    assert recorded(tmp_path, value) == {}
    assert f"not a number, so not in metrics.jsonl: valid/score ({type(value).__name__})" in caplog.text
    with pytest.raises(HookError, match="Best monitors valid/score, which is not a number"):
        recorded(tmp_path / "again", value, Best())
