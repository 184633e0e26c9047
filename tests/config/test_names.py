"""Names in a config and the files and classes they mean."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from emrun.base.errors import ConfigError
from emrun.base.wording import normalised
from emrun.config import names
from emrun.config.config import load_config
from emrun.config.import_finder import locate
from emrun.config.names import NoModule
from emrun.config.plan import check_statically

ROOT = Path(names.__file__).parents[1]


@pytest.mark.parametrize("name", ["StopAfter", "stop_after", "stopafter", "STOP_AFTER"])
def test_short_names_are_compared_without_case_and_underscores(name):
    assert names.dotted_path(name, "hook") == "emrun.hooks.stop_after.StopAfter"


@pytest.mark.parametrize(
    "name, kind, path",
    [
        ("Digits", "dataset", "emrun.datasets.digits.Digits"),
        ("majority", "dataset", "emrun.datasets.majority.Majority"),
        ("TorchModel", "model", "emrun.models.torch_model.TorchModel"),
        ("torch_model", "model", "emrun.models.torch_model.TorchModel"),
        ("Digits", "hook", None),
        ("StopAfter", "dataset", None),
        ("StopAfter", "", None),
        ("", "hook", None),
        ("__init__", "hook", None),
    ],
)
def test_a_kind_has_names_of_its_own(name, kind, path):
    assert names.dotted_path(name, kind) == path


@pytest.mark.parametrize("kind, folder", [("hook", "hooks"), ("dataset", "datasets")])
def test_every_file_of_a_folder_has_the_class_it_is_named_for(kind, folder):
    stems = {path.stem for path in (ROOT / folder).glob("[!_]*.py")}
    assert len(stems) > 1
    found = [names.dotted_path(stem, kind) for stem in stems]
    assert None not in found
    assert len(names.short_names(kind)) == len(stems)


@pytest.mark.parametrize("kind", ["hook", "dataset", "model"])
def test_what_a_short_name_means_can_be_imported(kind):
    for name in names.short_names(kind):
        assert locate(names.dotted_path(name, kind)).__name__ == name


def test_names_are_found_without_importing_torch_or_a_hook():
    code = (
        "import sys; from emrun.config import names; names.short_names('hook'); names.dotted_path('Digits', 'dataset');"
        "assert not {'torch', 'numpy', 'emrun.hooks', 'emrun.datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_former_names_are_written_as_they_are_compared_and_are_free():
    assert names.advice().keys() == {"hook", "key", "schedule", "precision"}
    for table in names.advice().values():
        assert list(table) == [normalised(name) for name in table]
    assert not [name for name in names.advice()["hook"] if names.dotted_path(name, "hook")]
    written = re.findall(r'^(\w+) = "(.*)"$', names._OTHERS.read_text(), re.MULTILINE)
    given = [(kind, name) for kind, several in written if kind != "text" for name in several.split()]
    assert len(set(given)) == len(given) > 200


TRANSFORMERS = {  # the names of `transformers.get_scheduler`, and what a config gets for them
    "linear": "Linear",
    "cosine": "Cosine",
    "polynomial": "Polynomial",
    "constant": "Constant",
    "inverse_sqrt": "InverseSqrt",
    "reduce_lr_on_plateau": "ReduceLROnPlateau",
    "cosine_with_restarts": "{class: Cosine, cycles: 3, warmup: 5%}",
    "constant_with_warmup": "{class: Constant, warmup: 5%}",
    "cosine_with_min_lr": "{class: Cosine, warmup: 5%, final: 0.1}",
    "cosine_warmup_with_min_lr": "{class: Cosine, warmup: 5%, final: 0.1}",
    "warmup_stable_decay": "{class: Constant, warmup: 5%, cooldown: 20%}",
    "OneCycle": "{class: Cosine, warmup: 30%}",
    "WSD": "{class: Constant, warmup: 5%, cooldown: 20%}",
    "greedy": "{class: ReduceLROnPlateau, metric: valid/loss/mean}",
    "Noam": "{class: InverseSqrt, warmup: 500 updates}",
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_schedules_of_other_tools_are_found_or_answered_with_what_to_write(name):
    model = {
        "module": {"class": "torch.nn.Linear", "in_features": 1, "out_features": 1},
        "optimizer": {"class": "SGD", "lr": 0.1},
        "scheduler": {"class": name, "metric": "valid/loss"} if "plateau" in name else {"class": name},
    }
    config = load_config({"dataset": {"class": "Digits"}, "model": model, "hooks": []})
    wanted = TRANSFORMERS[name]
    if not wanted.startswith("{"):
        check_statically(config)
        return
    with pytest.raises(ConfigError) as caught:
        check_statically(config)
    assert f"neither emrun nor torch has a schedule {name!r}: write {wanted}" in str(caught.value)
    arguments = dict(YAML(typ="safe").load(wanted))
    check_statically(load_config({"dataset": {"class": "Digits"}, "model": {**model, "scheduler": arguments}}))


@pytest.mark.parametrize(
    ("module", "advice"), [("torchmetrics", "pip install 'emrun[metrics]'"), ("torchmetric", "code_directory")]
)
def test_a_package_that_an_extra_has_is_named_with_the_extra(module, advice):
    assert advice in str(NoModule(module))
