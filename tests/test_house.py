"""The structure of the code: imports go one way, the help imports little, the packages of the wheel are the folders."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from house_figures import read
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
ROOT_PACKAGE = "the root"
MAY_IMPORT = {
    "base": set(),
    "ranks": {"base"},
    ROOT_PACKAGE: {"base", "ranks"},
    "config": {ROOT_PACKAGE, "base"},
    "streams": {ROOT_PACKAGE, "base", "ranks"},
    "storage": {ROOT_PACKAGE, "base", "ranks"},
    "record": {ROOT_PACKAGE, "base", "ranks", "storage"},
    "loop": {ROOT_PACKAGE, "base", "ranks", "streams", "storage", "record"},
    "models": {ROOT_PACKAGE, "base", "ranks", "storage"},
    "hooks": {ROOT_PACKAGE, "base", "ranks", "storage", "record"},
    "datasets": {ROOT_PACKAGE, "base", "streams", "storage"},
    "runs": {ROOT_PACKAGE, "base", "config", "storage", "record"},
    "training": {ROOT_PACKAGE, "base", "ranks", "config", "storage", "record", "loop", "runs"},
    "launch": {ROOT_PACKAGE, "base", "ranks", "config", "storage", "runs"},
    "exports": {ROOT_PACKAGE, "base", "ranks", "config", "storage", "record", "loop", "runs", "training"},
    "diagnosis": {
        ROOT_PACKAGE,
        "base",
        "ranks",
        "config",
        "streams",
        "storage",
        "record",
        "loop",
        "training",
        "launch",
        "runs",
    },
    "cli": {ROOT_PACKAGE, "base", "ranks", "config", "loop", "training", "diagnosis", "runs", "launch", "exports"},
}
"""The packages whose modules a package may import, besides its own."""
ONLY = {
    ("cli", "loop"): {"emrun.loop.interrupts"},
    ("runs", "storage"): {
        f"emrun.storage.{name}"
        for name in (
            *("checkpoints.manifest", "code.files", "code.snapshot"),
            *("files", "lines", "lock", "log", "plain", "run", "sealed", "trace"),
        )
    },
    ("runs", "record"): {f"emrun.record.{name}" for name in ("rows", "steps")},
}
"""The only modules that a package may import from another package: for `runs`, those that need no torch."""
LATE = {"group", "shares", "pieces", "stream_context", "names", "init_from", "compilation", "sharding"}
LATE |= {"first_look", "lazy", "loaded_outside", "networks", "outside", "shown", "sweep", "tables", "templates"}
"""Modules that import torch, its compiler, torchvision, NumPy, Optuna, entry points or Pillow only when needed."""


def house(root):
    """Return every module of emrun: dotted name -> (package, file)."""
    found = {}
    for path in sorted((root / "emrun").rglob("*.py")):
        parts = path.relative_to(root / "emrun").with_suffix("").parts
        package = parts[0] if len(parts) > 1 else ROOT_PACKAGE
        if package not in ("hooks", "datasets", "sample_configs"):
            found[".".join(("emrun", *parts)).removesuffix(".__init__")] = package, path
    for package in ("hooks", "datasets"):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(("emrun", *parts)).removesuffix(".__init__")] = package, path
    return found


def imports_of(path, with_late=True):
    """Return the modules that a file imports, including imports for type checkers only."""
    _, everywhere, at_the_top = read(path.read_text(encoding="utf-8"))
    return everywhere if with_late else at_the_top


def imports_within(root):
    """Return the imports between emrun's modules, without the lazy imports of `emrun` itself."""
    modules = house(root)
    return {
        name: (imports_of(path) & modules.keys()) - {"emrun", name}
        for name, (_, path) in modules.items()
        if name not in ("emrun", "emrun.__main__")
    }


def broken_rules(root):
    modules = house(root)
    found = []
    for name, imported in imports_within(root).items():
        own = modules[name][0]
        for other in sorted(imported):
            package = modules[other][0]
            allowed = package == own or package in MAY_IMPORT[own]
            if not allowed or (other != f"emrun.{package}" and other not in ONLY.get((own, package), {other})):
                found.append(f"{name} imports {other}")
    return found


def circle(root):
    """Return the modules in import cycles, and those that import them."""
    graph = imports_within(root)
    while free := {name for name, needs in graph.items() if not needs & graph.keys()}:
        graph = {name: needs for name, needs in graph.items() if name not in free}
    return sorted(graph)


def test_packages_import_only_what_the_table_allows():
    assert broken_rules(ROOT) == []


def test_no_module_imports_itself_through_others():
    assert circle(ROOT) == []


def test_the_picture_of_the_architecture_is_that_of_the_imports(monkeypatch):
    """`python tests/house_picture.py --write` draws it anew."""
    monkeypatch.setitem(sys.modules, "test_house", sys.modules[__name__])  # which has parsed the files
    from house_picture import PAGE, page_with, picture

    assert PAGE.read_text(encoding="utf-8") == page_with(picture())


@pytest.fixture
def copy(tmp_path):
    for folder in ("emrun", "hooks", "datasets"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_an_import_from_config_to_storage_is_found(copy):
    with (copy / "emrun" / "config" / "overrides.py").open("a") as file:
        file.write("from emrun.storage import lock\n")
    assert "emrun.config.overrides imports emrun.storage.lock" in broken_rules(copy)


def test_an_import_for_type_checkers_from_hook_to_the_loop_is_found(copy):
    with (copy / "emrun" / "hook.py").open("a") as file:
        file.write("if TYPE_CHECKING:\n    from emrun.loop.main_loop import MainLoop\n")
    assert "emrun.hook imports emrun.loop.main_loop" in broken_rules(copy)
    assert {"emrun.hook", "emrun.loop.main_loop"} <= set(circle(copy))


def test_only_one_file_imports_by_name():
    engine = {name: path for name, (package, path) in house(ROOT).items() if package not in ("hooks", "datasets")}
    users = [name for name, path in engine.items() if "importlib.import_module" in path.read_text("utf-8")]
    assert users == ["emrun.config.import_finder"]


def test_only_listed_modules_have_late_imports():
    for name, (package, path) in house(ROOT).items():
        late = imports_of(path) - imports_of(path, with_late=False)
        if package not in ("cli", "hooks", "datasets") and path.stem not in LATE and name != "emrun":
            assert not late, name


def test_help_imports_no_torch_and_nothing_else_heavy():
    code = (
        "import sys; from emrun.cli import emrun\n"
        "try: emrun.main(['--help'], standalone_mode=False)\n"
        "finally: print(sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(ast.literal_eval(done.stderr))
    assert not loaded & {"torch", "numpy", "ruamel", "tqdm", "safetensors", "sklearn"}


WITHOUT_TORCH = (
    "base.errors", "hook", "config.yaml_tree", "config.config", "config.names", "storage.run", "storage.files",
    "loop.interrupts", *sorted(f"runs.{path.stem}" for path in (ROOT / "emrun" / "runs").glob("[!_]*.py")),
)  # fmt: skip


def test_reading_a_config_and_a_run_directory_needs_no_torch():
    code = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH}:\n"
        "    importlib.import_module(f'emrun.{name}')\n"
        "    assert 'torch' not in sys.modules, name"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


@pytest.mark.campaign  # half of what this file takes: the process imports PyTorch
def test_no_module_imports_what_pytorch_imports_for_the_first_optimizer():
    apart = ("emrun.diagnosis", "emrun.hooks", "emrun.datasets", "emrun.sample_configs", "emrun.__main__")
    code = (
        "import emrun, importlib, pkgutil, sys\n"
        "for module in pkgutil.walk_packages(emrun.__path__, 'emrun.'):\n"
        f"    if not module.name.startswith({apart}):\n"
        "        importlib.import_module(module.name)\n"
        "        assert 'torch._dynamo' not in sys.modules, module.name\n"
        "assert 'emrun.models.sync_batch_norm' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_importing_a_hook_imports_one_file():
    code = (
        "import sys; from emrun.hooks import StopAfter\nprint([m for m in sys.modules if m.startswith('emrun.hooks.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ast.literal_eval(done.stdout) == ["emrun.hooks.stop_after"]


@pytest.mark.parametrize("folder", ["hooks", "datasets"])
def test_every_built_in_is_exported_under_its_name(folder):
    import emrun.config.import_finder
    import emrun.config.names

    package = emrun.config.import_finder.locate(f"emrun.{folder}")
    paths = emrun.config.names.built_ins(folder.removesuffix("s")).values()
    classes = {stem: name for _, _, stem, name in (each.split(".") for each in paths)}
    for path in (ROOT / folder).glob("[!_]*.py"):
        name = classes.pop(path.stem, None)
        assert name, f"{path} has no class of its name"
        assert name.lower() == path.stem.replace("_", "")
        assert getattr(package, name).__module__ == f"emrun.{folder}.{path.stem}"


def test_the_public_names_can_be_imported():
    import emrun

    tree = ast.parse((ROOT / "emrun" / "__init__.pyi").read_text())
    names = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert len(names) > 5
    assert {*names, "__version__"} <= set(dir(emrun))
    for name in names:
        assert getattr(emrun, name).__name__ == name


def test_the_version_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "emrun.__version__"}
    sources = {path: path.read_text(encoding="utf-8") for _, path in house(ROOT).values()}
    assert [path.name for path, text in sources.items() if re.search(r"^__version__\b", text, re.MULTILINE)] == [
        "__init__.py"
    ]
    assert [path for path, text in sources.items() if re.search(r"""version\(["']emrun""", text)] == []


def test_a_citation_has_what_its_format_requires_and_no_version_of_its_own():
    cited = YAML(typ="safe").load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert (cited["title"], cited["license"]) == (project["name"], project["license"])
    assert "version" not in cited


def test_make_without_a_target_prints_what_each_target_does():
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
    done = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    lines = [re.fullmatch(r"make ([a-z-]+) +(\S.*\.)", line) for line in done.stdout.splitlines()]
    assert sorted(line[1] for line in lines) == sorted(targets)


def test_every_file_has_a_test():
    covered_with = {
        "base/lazy": "test_house",
        "errors": "test_house",
        "record/metrics_log": "record/test_metrics",
        "record/interval_rows": "hooks/test_write_csv",
        "record/sinks": "hooks/test_write_csv",
        "record/trackers": "hooks/test_tracker",
        "record/intervals": "hooks/test_save_every",
        "loop/batches": "loop/test_training",
        "loop/determinism": "training/test_create",
        "loop/callbacks": "test_hook",
        "loop/parts": "loop/test_main_loop",
        "loop/prefetching": "models/test_prefetching",
        "loop/progress": "loop/test_training",
        "loop/ranks/callbacks": "loop/ranks/test_batches",
        "loop/failures": "storage/test_capsules",
        "models/modes": "models/test_torch_model",
        "loop/session": "loop/test_requests",
        "loop/ranks/states": "training/test_ranks",
        "loop/outcome": "loop/test_requests",
        "loop/loss_watch": "loop/test_main_loop",
        "model": "loop/test_main_loop",
        "runs/comparison": "cli/test_diff",
        **{f"runs/report/{name}": "cli/test_report" for name in ("page", "one_run", "several_runs", "facts", "curves")},
        "training/build": "training/test_create",
        "models/weights/averages": "hooks/test_average_weights",
        "models/schedules/longer_run": "training/test_longer_runs",
        "models/schedules/curves": "models/schedules/test_built_in",
        "models/weights/matching": "models/weights/test_init_from",
        "models/device": "models/test_torch_model",
        "models/forward_pass": "models/test_torch_model",
        "models/module_model": "models/test_torch_model",
        "models/weights/module_weights": "models/weights/test_saving",
        "models/ensemble": "training/test_members",
        "models/sequence": "training/test_members",
        "models/step/choice": "models/step/test_updater",
        "models/step/gradient_sums": "models/step/test_summed",
        "models/step/gradients": "models/step/test_updater",
        "models/step/single": "models/step/test_updater",
        "models/step/training_step": "models/step/test_updater",
        "base/patterns": "models/optimizers/test_groups",
        "config/yaml_slips": "config/test_yaml_tree",
        "diagnosis/probe": "diagnosis/test_verification",
        "diagnosis/first_config": "diagnosis/test_first_look",
        "diagnosis/run_verification": "cli/test_verify_run",
        "diagnosis/recorded_trainings": "diagnosis/test_verification",
        "diagnosis/differences": "diagnosis/test_verification",
        "diagnosis/model_facts": "diagnosis/test_tryout",
        "diagnosis/round_trip": "diagnosis/test_tryout",
        "diagnosis/numerics/rows": "diagnosis/numerics/test_proof",
        "models/frozen_parts": "models/optimizers/test_named",
        "models/optimizers/bare_step": "models/step/test_updater",
        "models/optimizers/parameters": "models/optimizers/test_named",
        "models/step/size_search": "models/step/test_micro_batches",
        "streams/packing": "streams/test_workers",
        "streams/pass_lengths": "loop/test_run_length",
        "runs/run_files": "runs/test_pruning",
        "base/preparations": "training/test_preparation",
        "storage/preparation": "training/test_preparation",
        "exports/loaded_outside": "exports/test_weights",
        "streams/worker_process": "streams/test_workers",
        **{
            f"exports/{name}": "exports/test_export"
            for name in ("card", "comparison", "folder", "formats", "identity", "measured", "outside")
        },
        **{f"exports/{name}": "exports/test_export" for name in ("program", "programs", "tracing")},
    }
    for name, (package, path) in house(ROOT).items():
        if path.stem.startswith("_") or path.parent.name.startswith("_") or package == "cli":
            continue
        place = "/".join(name.split(".")[1:])
        test = covered_with.get(place) or "/".join([*place.split("/")[:-1], f"test_{path.stem}"])
        assert (ROOT / "tests" / f"{test}.py").exists(), name


def test_the_packages_of_the_wheel_are_the_folders():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["setuptools"]["packages"])
    found = {
        "emrun",
        "emrun.sample_configs",
        *(".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "emrun").rglob("*/__init__.py")),
        *(f"emrun.hooks.{path.parent.name}" for path in (ROOT / "hooks").glob("*/__init__.py")),
    }
    assert packages == found
    for name in ("hooks", "datasets", "sample_configs"):
        assert (ROOT / "emrun" / name).readlink() == Path("..") / name


OTHER_WORDS = {"extends", "metrics.jsonl", "steps.jsonl", "rows.jsonl", "latest", "best"}
"""Names in the docstrings of packages that are not modules."""


def packages_of_engine():
    """Return dotted name of a package in `emrun` -> its docstring."""
    found = {}
    for name, (_, path) in house(ROOT).items():
        if path.stem == "__init__" and name != "emrun":
            found[name] = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return found


def allowed_by(package, texts):
    """Return what a package may import as its docstring says: the names of packages, without itself."""
    [line] = re.findall(r"May import: (.*?)\.$", texts[package].replace("\n", " "))
    if outer := re.fullmatch(r"what `(\w+)` may", line):
        return MAY_IMPORT[outer[1]]
    return set() if line == "nothing of emrun" else {each.strip("`") for each in line.split(", ")}


def test_each_package_says_what_it_may_import():
    texts = packages_of_engine()
    for package in texts:
        assert allowed_by(package, texts) == MAY_IMPORT[package.split(".")[1]], package


def test_the_docstring_of_a_package_names_modules_that_exist():
    modules = {name: path for name, (_, path) in house(ROOT).items()}
    for package, text in packages_of_engine().items():
        folder = modules[package].parent
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", text.partition("May import")[0]):
            is_file = (folder / name).is_file()
            is_module = {f"{package}.{name}", f"emrun.{name}", name} & modules.keys()
            assert is_file or is_module or name in OTHER_WORDS, (package, name)


LARGEST_BINARY = 100_000  # bytes


def test_the_repository_holds_no_large_binary_file():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    large = [path for path in paths if path.is_file() and path.stat().st_size > LARGEST_BINARY]
    assert [path.name for path in large if b"\0" in path.read_bytes()] == []


def test_each_error_of_emrun_can_be_imported_from_one_place():
    from emrun import errors
    from emrun.base.errors import EmrunError

    kinds = [EmrunError]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each.__module__ == "emrun.base.errors"]
    assert sorted({kind.__name__ for kind in kinds}) == sorted(errors.__all__)


def test_the_code_contains_no_absolute_path():
    pattern = re.compile(r"/(work|home|root|opt|tmp)/\w")
    for folder in ("emrun", "hooks", "datasets", "sample_configs", "benchmarks"):
        for path in (ROOT / folder).rglob("*.[py][ya]*"):
            if path.suffix == ".pyc":
                continue
            assert not pattern.search(path.read_text(encoding="utf-8")), path
