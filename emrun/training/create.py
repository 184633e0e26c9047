"""A run from its config to its end, from top to bottom."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from emrun.base.arguments import resolved
from emrun.base.errors import ConfigError, Problem, RankFailed, StateError, UsageError
from emrun.base.preparations import PREPARATION, Preparations
from emrun.base.randomness import draw_seed, seed_everything, sole_use
from emrun.base.user_modules import find_user_modules
from emrun.base.wording import counted, from_here, listed
from emrun.config.config import Config, load_config, read_config
from emrun.config.import_finder import Imported
from emrun.config.interpolation import escaped
from emrun.config.overrides import in_name
from emrun.config.plan import Plan, code_directories
from emrun.config.planner import Planner
from emrun.config.sections import check_hooks
from emrun.config.yaml_text import dump
from emrun.epoch_data import declared
from emrun.hook import AbstractHook
from emrun.loop.outcome import Outcome
from emrun.model import AbstractModel
from emrun.ranks.group import Exchange, join, ranks
from emrun.runs.report.page import write_at_end
from emrun.runs.run_files import others_shown, remove_run
from emrun.schedule_plan import log_plan
from emrun.storage.class_names import record_classes
from emrun.storage.log import LOG_OF_RANK, RunLog
from emrun.storage.plain import write_with_plain
from emrun.storage.preparation import record_preparation
from emrun.storage.run import CONFIG, Run, create_run
from emrun.training.build import Training, assemble, plan_schedule
from emrun.training.members import load_model
from emrun.training.user_code import check_same_code, log_code_directory, record_code

_LOG = logging.getLogger(__name__)

DRAWN = ("seed", "code_directory")
"""The keys that are added to the config of a run if the given config does not have them."""
FOUND = ("model.micro_batch_size",)
"""The keys that may be `auto`."""


def create_training(
    config: str | Path | Mapping[str, Any],
    output_root: str | Path = "log",
    output_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    command: Sequence[str] = (),
    remove_failed: bool = False,
    checks_schedule: bool = True,
    added_hooks: Sequence[str] = (),
    prepared: Path | None = None,
) -> Training:
    """Create a run directory and build all objects that a config describes.

    Args:
        config: a file, a directory that holds `config.yaml`, or a mapping.
        output_root: the directory in which the run directory is created.
        output_dir: the run directory itself, which is new or empty, or holds a run whose start failed.
        overrides: `key.path=value` to set a value, `~key.path` to delete a key.
        command: the command line, for the trace.
        remove_failed: whether to delete the run directory if building fails for any reason.
        checks_schedule: whether to check that the schedule fits the length of the run, and to log its learning rates.
        added_hooks: hooks without arguments that are added if the config does not list them, but not to the config of
            the run: `LogVariables` and `ShowProgress`, as `emrun train` adds them.
        prepared: the directory of a run with the same data, whose classes and preparation the dataset has.

    Raises:
        ConfigError: the config cannot be used; nothing is left on disk.
        UsageError: the ranks cannot meet, or have different configs.
        RunExists: the directory holds a run (a `UsageError`).
        StorageError: the directory cannot be written.
        BaseException: an error of the dataset, the model or a hook while it is built; the trace records it.
    """
    joined = join()
    root = resolved(output_root)
    place = None if output_dir is None else resolved(output_dir)
    with joined.in_step() as exchange:
        # the plan, which is the same on all ranks
        drawn = dict(zip(DRAWN, exchange("drawn seed", (draw_seed(), escaped(str(Path.cwd())))), strict=True))
        loaded = load_config(config, overrides).without("sweep").with_defaults(drawn)
        plan = Plan.of(loaded, added=added_hooks)
        check_alike(plan, exchange)
        plan.check_trainable()
        if not joined.is_first:
            return follow(plan, Path(exchange("run directory", None)), exchange, is_new=True, classes=prepared)

        # the run directory
        existed = place is not None and place.exists()
        had_root = place is not None or root.exists()
        run = create_run(
            dump(loaded.root, loaded.text),
            plan.get("name", None) or loaded.name,
            output_root=root,
            output_dir=place,
            seed=plan.get("seed", 0),
            command=command,
            plain=loaded.root.plain(),
            overrides=in_name(loaded.overrides),
        )
        record_code(plan, run)

        # the objects
        try:
            with kept_or_removed(run, existed, remove_failed), run.log:
                warn_of(loaded.notes)
                log_code_directory(plan)
                exchange("run directory", str(run.directory))
                training = connected(
                    assemble_alike(plan, exchange, run.directory, run, is_new=True, classes=prepared), run
                )
                run.trace.write(device=device_of(training.model))
                warn_of([each for each in [unused_gpu(training.model)] if each])
                schedule = plan_schedule(training, plan) if checks_schedule else None
                record_classes(training.dataset, run.directory)
                record_preparation(training.prepared, run.directory)
                exchange("all is ready", None)
                _LOG.info(
                    "run directory: %s", from_here(run.directory)
                )  # not before a mistake in the config, which deletes it
                log_plan(schedule)
                return training
        except (ConfigError, UsageError):
            if not had_root:
                with suppress(OSError):  # another run has been created in it
                    run.directory.parent.rmdir()
            raise
        except BaseException:
            if run.directory.exists():
                _LOG.info("run directory: %s", from_here(run.directory))
            raise


def create_dataset(config: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), model: Any = None) -> Any:
    """Build the dataset of a config, with random numbers from the config's seed and without a run directory.

    Args:
        config: a file, a directory that holds `config.yaml`, or a mapping.
        overrides: see `create_training`.
        model: the model, for a dataset that takes one; by default the model of the config is built.

    Raises:
        ConfigError: the config cannot be used.
        BaseException: an error of the dataset while it is built.
    """
    return _build_alone(load_config(config, overrides), "dataset", {"model": model})[0]


def create_model(
    config: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), dataset: Any = None
) -> AbstractModel:
    """Build the model of a config, with random numbers from the config's seed and without a run directory.

    Args:
        config: a file, a directory that holds `config.yaml`, or a mapping. Only its section `model` is required.
        overrides: see `create_training`.
        dataset: the dataset, for a model that takes one; by default the dataset of the config is built.

    Raises:
        ConfigError: the config cannot be used.
        BaseException: an error of the model while it is built.
    """
    model: AbstractModel = _build_alone(load_config(config, overrides), "model", {"dataset": dataset})[0]
    return model


def create_hooks(
    config: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), model: Any = None, dataset: Any = None
) -> tuple[AbstractHook, ...]:
    """Build the hooks of a config without a run directory. Hooks that need one raise an error when they are used.

    Args:
        config: a file, a directory that holds `config.yaml`, or a mapping. Only its section `hooks` is required.
        overrides: see `create_training`.
        model: the model, for hooks that take one.
        dataset: the dataset, for hooks that take one.

    Raises:
        ConfigError: the config cannot be used.
        BaseException: an error of a hook while it is built.
    """
    return tuple(_build_alone(load_config(config, overrides), "hooks", {"model": model, "dataset": dataset}))


@sole_use("building")
def _build_alone(config: Config, name: str, supplied: dict[str, Any]) -> list[Any]:
    """Build the dataset, the model or the hooks of a config; the other sections are not read.

    Args:
        config: the config.
        name: the section.
        supplied: the objects to pass on. If a model takes a dataset, or a dataset a model, and this has None, the other
            is built too.
    """
    tree = config.tree
    section = tree.get(name)
    kind, word = (list, "a list") if name == "hooks" else (dict, "a mapping")
    if section is None or section.value is None:
        raise ConfigError(Problem(tree.position, "", f"missing section {name!r}", "config.missing-key"))
    if not isinstance(section.value, kind):
        raise ConfigError(Problem(section.position, name, f"{section.shown()!r} is not {word}", "config.type"))
    find_user_modules(*code_directories(tree))
    planner = Planner(Imported())
    if name == "hooks":
        planner.problems += check_hooks(section, name)
        recipes = planner.hooks(list(section.value))
    else:
        recipes = [planner.section(section, name)]
    other = {"model": "dataset", "dataset": "model"}.get(name)
    needs = other if other and supplied[other] is None and recipes[0] and recipes[0].wants(other) else None
    if needs == "model":
        planner.check_circle(recipes[0], planner.section(tree.get("model"), "model"))
    elif needs == "dataset":
        planner.check_circle(planner.section(tree.get("dataset"), "dataset"), recipes[0])
    if planner.problems:
        raise ConfigError(planner.problems)
    if needs is not None:
        supplied[needs] = _build_alone(config, needs, {name: None})[0]
    seed = config.get("seed")
    seed_everything(seed if isinstance(seed, int) else 0, name)
    policy = tree.get("main_loop", "on_bad_example")
    given = {**supplied, "output_dir": None, "on_bad_example": "error" if policy is None else policy.value}
    given |= {"load_model": partial(load_model, given, []), PREPARATION: Preparations()}
    return [recipe.build(given) for recipe in recipes]


def connected(training: Training, run: Run) -> Training:
    """Connect a training with its run, and return it.

    The trace notes the names that hooks write. What the model finds for `auto` is written to the config, so that a
    resume has it; at the end, unless `main_loop.report` is false, a page of the run is written.
    """
    claim_files(training, run)
    training.model.write_setting = partial(_write, run)
    run.write_report = write_at_end if training.main_loop.report else None
    return training


def claim_files(training: Training, run: Run) -> None:
    """Note the names that hooks write in the directory of a run.

    Raises:
        UsageError: there is something under a name that the run has not had.
    """
    run.claim(name for hook in training.hooks for name in declared(hook, "files") or ())


def _write(run: Run, argument: str, value: Any) -> None:
    """Set an argument of the model in the config of a run."""
    config = read_config(run.directory).overridden([f"model.{argument}={value}"])
    write_with_plain(run.directory / CONFIG, dump(config.root, config.text), config.root.plain())


def train(training: Training) -> Outcome:
    """Train until the run ends.

    Raises:
        BaseException: the error that made the run fail.
    """
    return training.main_loop.run_training()


def check_alike(plan: Plan, exchange: Exchange) -> None:
    """Check that this rank has the same config as rank 0.

    Args:
        plan: the plan of this rank.
        exchange: see `Ranks.in_step`.

    Raises:
        UsageError: the config is another one.
    """
    own_config = {key: repr(value) for key, value in plan.config.plain().items()}
    first: dict[str, str] = exchange("config", own_config)
    different = [key for key in {**first, **own_config} if first.get(key) != own_config.get(key)]
    if different:
        raise UsageError(f"rank 0 has another config ({listed(different)}); start all ranks with the same one")


def assemble_alike(plan: Plan, exchange: Exchange, *arguments: Any, **named: Any) -> Training:
    """Build all objects, on each rank from the same code; see `assemble` and `check_same_code`."""
    training = assemble(plan, *arguments, **named)
    check_same_code(plan, exchange)
    return training


def follow(
    plan: Plan,
    directory: Path,
    exchange: Exchange,
    load: Callable[[Training], object] = lambda training: None,
    *,
    is_new: bool = False,
    is_evaluation: bool = False,
    classes: Path | None = None,
) -> Training:
    """Build all objects on a rank other than 0, which writes nothing but its log.

    Args:
        plan: the plan.
        directory: the directory that rank 0 writes.
        exchange: see `Ranks.in_step`.
        load: called when the objects are built; loads the checkpoint that rank 0 has loaded, if any.
        is_new: see `assemble`.
        is_evaluation: see `assemble`.
        classes: see `assemble`.
    """
    log = RunLog(directory / LOG_OF_RANK.format(ranks().rank))
    with log:
        training = assemble_alike(
            plan, exchange, directory, None, log, is_new=is_new, is_evaluation=is_evaluation, classes=classes
        )
        load(training)
        exchange("all is ready", None)
        return training


@contextmanager
def kept_or_removed(run: Run, existed: bool, remove_failed: bool = False) -> Iterator[None]:
    """Remove the run if its config cannot be used, but keep it after any other error.

    Args:
        run: the run.
        existed: whether the directory existed before. Then it stays.
        remove_failed: whether to remove the run after any error.
    """
    try:
        yield
    except BaseException as error:
        is_mistake = isinstance(error, RankFailed) and error.exit_status == ConfigError.exit_status
        is_mistake = is_mistake or isinstance(error, ConfigError | UsageError | StateError)
        if (is_mistake or remove_failed) and remove(run, keeps_directory=existed):
            if not is_mistake:
                _LOG.info("deleted %s, because building failed", from_here(run.directory))
        else:
            outcome = Outcome.of(error)
            run.write_report = None  # the training has not begun
            run.end(outcome.status, outcome.exit_status, outcome.reason)
        raise


def remove(run: Run, *, keeps_directory: bool = False) -> bool:
    """Delete a run and its directory, and return whether it was deleted; if something else is there, a warning says it.

    Args:
        run: the run.
        keeps_directory: whether the empty directory stays.

    Raises:
        RunInUse: another process has taken the run over; nothing is deleted.
        StorageError: something cannot be deleted.
    """
    other_files = remove_run(run.directory, keeps_directory=keeps_directory)
    if other_files:
        _LOG.warning("%s stays: it %s", from_here(run.directory), others_shown(run.directory, other_files))
        return False
    run.release()
    return True


def warn_of(notes: Iterable[str]) -> None:
    """Log notes about a config as warnings; the terminal shows each note only once."""
    for note in notes:
        _LOG.warning("%s", note, extra={"once": True})


def unused_gpu(model: AbstractModel) -> str | None:
    """Return what to say of a model on the CPU of a machine with a GPU; None for nothing."""
    device = getattr(model, "device", None)
    if not isinstance(device, torch.device) or device.type != "cpu" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    return f"the model is trained on the CPU, and the GPU ({name}) is not used; model.device=auto takes the GPU"


def device_of(model: AbstractModel) -> str | None:
    """Return the device of a model with what its results may depend on: `cpu, 4 threads`, `cuda:0, NVIDIA H200`.

    None if the model does not say.
    """
    device = getattr(model, "device", None)
    if not isinstance(device, torch.device):
        return None
    if device.type == "cpu":
        count = torch.get_num_threads()
        return f"cpu, {counted(count, 'thread')}"
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return str(device)
