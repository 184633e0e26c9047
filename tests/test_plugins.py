"""Packages that add hooks, datasets and models: a small one.

`make campaign` installs it for real; `make test` writes the same metadata, which are most of an installation.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parent / "plugin"
CONFIG = """\
dataset: {class: Squares, n: 20}
model: {class: constant, value: 1.0}
hooks:
  - CountBatches: {word: pieces}
  - StopAfter: {epochs: 2}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a directory with the package and the metadata that pip writes from its `pyproject.toml`."""
    target = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PLUGIN / "emrun_extras", target / "emrun_extras")
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    metadata = target / f"emrun_extras-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
    lines = []
    for group, names in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {path}" for name, path in names.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return target


@pytest.fixture(scope="module")
def installed_by_pip(tmp_path_factory):
    """Install the package into a directory of its own; return it."""
    place = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PLUGIN, place / "source")
    target = place / "installed"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, str(place / "source")]
    subprocess.run(command, check=True, capture_output=True, timeout=110)
    return target


@pytest.fixture
def with_package(installed, tmp_path, warm):
    """Run the command in an empty directory, in a process that finds the package and `more` besides."""

    def run(*arguments, config=CONFIG, more=()):
        (tmp_path / "c.yaml").write_text(config)
        paths = [str(installed), *map(str, more)]
        script = f"import sys\nsys.path[1:1] = {paths}\nfrom emrun.cli import main\nsys.exit(main())\n"
        (tmp_path / "command.py").write_text(script)
        return warm.run([str(tmp_path / "command.py"), *arguments], tmp_path, timeout=60)

    return run


def test_a_package_adds_a_hook_a_dataset_and_a_model_under_short_names(with_package):
    done = with_package("train", "c.yaml")
    assert done.returncode == 0, done.stderr
    assert "12 pieces" in done.stderr  # the zeroth epoch and two of training, of four batches each


@pytest.mark.campaign
def test_the_metadata_of_a_package_are_those_that_pip_writes(installed, installed_by_pip):
    written, by_pip = (next(distributions(path=[str(place)])) for place in (installed, installed_by_pip))
    assert (written.name, written.version) == (by_pip.name, by_pip.version)
    assert set(written.entry_points) == set(by_pip.entry_points)
    files = [sorted(path.name for path in place.glob("emrun_extras/*.py")) for place in (installed, installed_by_pip)]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            "CountBatches: {wrd: x}",
            "c.yaml:4:20: hooks[0].CountBatches: unknown argument 'wrd'; did you mean 'word'?",
        ),
        ("CountBatchs: {word: pieces}", "unknown hook 'CountBatchs'; did you mean 'CountBatches'?"),
        ("Broken", "c.yaml:4:5: hooks[0].Broken: emrun_extras.nowhere.Broken: emrun_extras (found at"),
    ],
)
def test_a_mistake_with_a_plugin_is_reported_like_any_other(with_package, wrong, message):
    done = with_package("train", "c.yaml", config=CONFIG.replace("CountBatches: {word: pieces}", wrong))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_package_does_not_replace_a_name_of_emrun(with_package):
    done = with_package("show", "StopAfter")
    assert done.stdout.startswith("Ends the training successfully")


def test_the_hooks_of_packages_are_listed_and_explained(with_package):
    assert re.search("CountBatches +emrun_extras.hooks.CountBatches", with_package("show", "hooks").stdout)
    assert with_package("show", "count_batches").stdout.startswith("Logs how many batches were run.")


@pytest.mark.campaign
def test_all_lists_have_the_hooks_of_packages_and_a_misspelt_one_has_a_suggestion(with_package):
    assert re.search("CountBatches +emrun_extras.hooks.CountBatches", with_package("show").stdout)
    done = with_package("show", "CountBatch")
    assert done.returncode == 2
    assert "did you mean 'CountBatches'?" in done.stderr


@pytest.fixture
def other_package(tmp_path):
    """Return the folder with the metadata of a second package, which provides the same name."""
    other = tmp_path / "other" / "more_extras-1.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: more-extras\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[emrun.hooks]\ncount_batches = more_extras:Count\n")
    return other.parent


def test_a_name_that_two_packages_provide_is_an_error_that_lists_both(with_package, other_package):
    for command in (["train", "c.yaml"], ["show", "CountBatches"]):
        done = with_package(*command, more=[other_package])
        assert done.returncode == 2, done.stderr
        assert "several packages provide hook 'CountBatches': " in done.stderr
        assert "emrun_extras.hooks.CountBatches" in done.stderr
        assert "more_extras.Count" in done.stderr
        assert "Traceback" not in done.stderr
    unambiguous = CONFIG.replace("  - CountBatches: {word: pieces}\n", "")
    assert with_package("train", "c.yaml", config=unambiguous, more=[other_package]).returncode == 0


@pytest.mark.campaign
def test_a_name_that_two_packages_provide_is_listed_by_its_dotted_path(with_package, other_package):
    listed = with_package("show", more=[other_package])
    assert listed.returncode == 0
    assert ", by its dotted path only" in next(line for line in listed.stdout.splitlines() if "more_extras" in line)
    assert with_package("config", "--schema", more=[other_package]).returncode == 0


def test_entry_points_are_not_read_when_every_name_is_emruns_own(tmp_path):
    module = "{class: torch.nn.Linear, in_features: 1, out_features: 1}"
    text = f"dataset: {{class: Digits}}\nmodel: {{module: {module}}}\nhooks: [{{StopAfter: {{epochs: 1}}}}]\n"
    (tmp_path / "c.yaml").write_text(text)
    code = (
        "import sys; from emrun.config.config import load_config; from emrun.config.plan import check_statically\n"
        "check_statically(load_config('c.yaml')); print('importlib.metadata' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
