"""The house: imports go one way, nothing heavy stands behind the help, packaging and folders agree."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = [
    {
        "errors",
        "censor",
        "fields",
        "lines",
        "lazy",
        "types",
        "yaml_tree",
        "yaml_slips",
        "files",
        "names",
        "randomness",
        "metrics",
        "running_stats",
        "type_hints",
        "pickling",
        "slow_start",
    },
    {"hook", "model", "stream_context", "state", "lock"},
    {"dataset", "interrupts", "config"},
    {"stream_pass", "reuse", "workers", "read_ahead"},
    {
        "stream",
        "outcome",
        "loss_watch",
        "checkpoint",
        "checkpointing",
        "run_dir",
        "batch_checks",
        "signatures",
        "capsule",
    },
    {"dataset_streams", "training_state"},
    {"check", "sources"},
    {"optimization", "torch_inputs", "torch_weights", "built_apart", "prefetching", "unsaved_state"},
    {"build", "main_loop", "torch_model"},
    {"preparation", "schema"},
    {"assembly"},
    {"training"},
    {"resuming", "contract", "replaying", "stream_bench"},
    {"probe", "verifying"},
    {"cli"},
]


def imports_of(path, with_late=True):
    """Return the modules that a file imports, without those that only type checkers see."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    nodes = ast.walk(tree) if with_late else ast.iter_child_nodes(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def engine_files():
    return [path for path in (ROOT / "emrun").glob("*.py") if not path.name.startswith("__")]


def floor_of(module):
    return next(index for index, floor in enumerate(FLOORS) if module in floor)


@pytest.mark.parametrize("path", engine_files(), ids=lambda path: path.stem)
def test_imports_go_down_the_floors_or_stay_on_one(path):
    own = floor_of(path.stem)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "emrun" and len(parts) > 1 and (ROOT / "emrun" / f"{parts[1]}.py").exists():
            assert floor_of(parts[1]) <= own, f"{path.stem} imports {name}"


def test_no_module_imports_itself_through_others():
    graph = {}
    for path in engine_files():
        names = {name.split(".")[1] for name in imports_of(path) if name.startswith("emrun.")}
        graph[path.stem] = {name for name in names if (ROOT / "emrun" / f"{name}.py").exists()}
    done = set()
    while len(done) < len(graph):
        free = {module for module, needs in graph.items() if module not in done and needs <= done}
        assert free, f"a circle among {sorted(set(graph) - done)}"
        done |= free


def test_the_engine_never_imports_hooks_or_datasets():
    for path in [*engine_files(), *(ROOT / "emrun" / "cli").glob("*.py")]:
        assert not [name for name in imports_of(path) if re.match(r"emrun\.(hooks|datasets)\b", name)], path


def test_hooks_and_datasets_never_import_the_loop():
    for path in [*(ROOT / "hooks").glob("*.py"), *(ROOT / "datasets").glob("*.py")]:
        forbidden = re.compile(r"emrun\.(main_loop|training|build|check|config|cli)\b")
        assert not [name for name in imports_of(path) if forbidden.match(name)], path


def test_only_build_imports_by_name():
    users = [path.stem for path in engine_files() if "importlib.import_module" in path.read_text(encoding="utf-8")]
    assert users == ["build"]


def test_late_imports_are_where_they_keep_something_light():
    allowed = {"stream_context", "names"}  # torch, which most streams do not need; entry points, which few configs do
    for path in engine_files():
        late = imports_of(path) - imports_of(path, with_late=False)
        assert not late or path.stem in allowed, f"{path.stem}: {late}"


def test_help_imports_no_torch_and_nothing_else_heavy():
    code = (
        "import sys; from emrun.cli import emrun\n"
        "try: emrun.main(['--help'], standalone_mode=False)\n"
        "finally: print(sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(ast.literal_eval(done.stderr))
    assert not loaded & {"torch", "numpy", "ruamel", "tabulate", "tqdm", "safetensors", "sklearn"}


@pytest.mark.parametrize("module", ["errors", "yaml_tree", "config", "names", "run_dir", "files", "hook", "interrupts"])
def test_reading_a_config_and_a_run_directory_needs_no_torch(module):
    code = f"import sys, emrun.{module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_one_hook_imports_one_file():
    code = (
        "import sys; from emrun.hooks import StopAfter\nprint([m for m in sys.modules if m.startswith('emrun.hooks.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ast.literal_eval(done.stdout) == ["emrun.hooks.stop_after"]


@pytest.mark.parametrize("folder", ["hooks", "datasets"])
def test_every_built_in_is_exported_under_its_name(folder):
    import emrun.build
    import emrun.names

    package = emrun.build.locate(f"emrun.{folder}")
    for path in (ROOT / folder).glob("[!_]*.py"):
        name = emrun.names.class_in(path)
        assert name, f"{path} has no class of its name"
        assert getattr(package, name).__module__ == f"emrun.{folder}.{path.stem}"


def test_the_public_names_can_be_imported():
    import emrun

    tree = ast.parse((ROOT / "emrun" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    names = [alias.name for node in block.body for alias in node.names]
    assert len(names) > 5
    for name in names:
        assert getattr(emrun, name).__name__ == name


def test_every_file_has_its_test():
    for path in [*engine_files(), *(ROOT / "hooks").glob("[!_]*.py"), *(ROOT / "datasets").glob("[!_]*.py")]:
        folder = "" if path.parent.name == "emrun" else path.parent.name
        mentions = [test for test in (ROOT / "tests" / folder).glob("test_*.py") if test.stem == f"test_{path.stem}"]
        covered_with = {
            "lazy": "house",
            "assembly": "training",
            "torch_inputs": "torch_model",
            "outcome": "main_loop",
            "yaml_slips": "yaml_tree",
            "loss_watch": "main_loop",
            "model": "main_loop",
            "preparation": "build",
            "probe": "verifying",
            "stream_pass": "stream",
        }
        if not mentions:
            assert (ROOT / "tests" / f"test_{covered_with.get(path.stem, path.stem)}.py").exists(), path


def test_the_packages_of_the_wheel_are_the_folders():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["setuptools"]["packages"])
    found = {"emrun", *(f"emrun.{path.parent.name}" for path in (ROOT / "emrun").glob("*/__init__.py"))}
    assert packages == found
    for name in ("hooks", "datasets"):
        assert (ROOT / "emrun" / name).readlink() == Path("..") / name


def test_no_absolute_path_stands_in_the_code():
    pattern = re.compile(r"/(work|home|root|opt|tmp)/\w")
    for folder in ("emrun", "hooks", "datasets", "sample_configs", "benchmarks"):
        for path in (ROOT / folder).rglob("*.[py][ya]*"):
            if path.suffix == ".pyc":
                continue
            assert not pattern.search(path.read_text(encoding="utf-8")), path
