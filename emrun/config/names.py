"""Translates the names in a config to modules and classes, without importing anything."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from emrun.base.wording import did_you_mean, nearest, normalised, sure

_HOUSE = Path(__file__).parents[1]
_FILES = {"hook": "hooks/[!_]*.py", "dataset": "datasets/[!_]*.py", "model": "models/torch_model.py"}
"""Kind -> the files of its built-in classes."""

_OWN_HOOK = "a hook of your own can"
_OWN_EVENTS = "write a hook of your own with the events that you need; the hooks that write rows take `every`"
_SCHEDULER = "set model.scheduler, e.g. {class: Cosine, warmup: 5%, final: 0.1}"
_PLATEAU = "set model.scheduler, e.g. {class: ReduceLROnPlateau, metric: valid/loss/mean}"
_STOPPING = "use the hook EarlyStopping: {variable: loss, condition: min, patience: 5}"
_CLIPPING = "use the hook ClipGradients: {norm: 1.0}, or {value: 0.5}"
_ACCUMULATION = "set model.accumulate, the number of batches of an update: 4"
_COMPILE = "set model.compile: true, or arguments of torch.compile: {dynamic: true}"
_RECOMPUTE = "set model.recompute, a regular expression for the names of the parts that are computed again"
_PRECISION = "set model.precision: bf16, fp16 or tf32"
_FREEZING = "use the hook Freeze: {match: REGEX, until: 2 epochs}; without until, always"
_NORMS = "use the hook LogNorms: {every: 10 updates}"
_AVERAGES = "use the hook AverageWeights: {half_life: 500 updates}, or {decay: 0.999}, or {kind: swa}"
_NUMBERS = "use the hook SetOverTime: {target: optimizer.weight_decay, end: 0.1, schedule: {class: Cosine}}"
_SAVING = (
    "SaveBest saves the best checkpoint or the best few, SaveEvery one every few epochs or updates; "
    "SaveLatest is always active"
)
_COMPARED = "set `variable` and `condition` (min or max) of the hook that compares: SaveBest, EarlyStopping"
_RATE = "every run records learning rates in steps.jsonl, metrics.jsonl and the log; remove this hook"
_BOARD = "use the hook WriteTensorBoard: {every: 50 updates}"
_TRACKER = f"use the hook WriteMLflow, WriteWandb or WriteTrackio; {_OWN_HOOK} derive from emrun.hooks.AbstractTracker"
_RECIPES = "look into docs/recipes.md and sample_configs/recipes: what is not a hook of emrun may be a few lines there"
_RESUME = "`emrun resume RUN_DIR` continues a run from its checkpoint"
_INITIAL = "set model.init_from to a run, a checkpoint or a file with weights"
_RESTORE = f"{_RESUME}; to begin a new run with its weights, set model.init_from"
_ONE_DEVICE = "emrun trains on one device so far; set model.device"
_INTERVAL = (
    "write the interval after the name of the stream: main_loop.extra_streams: [{valid: 5 epochs}]; to evaluate every "
    "500 updates, set main_loop.fixed_epoch_size: 500 updates"
)
_PART = "write the number after the name of the stream: main_loop.extra_streams: [{valid: {batches: 20}}]"
_STREAMS = "a stream is a method of the dataset, such as train_stream; main_loop.extra_streams lists those to evaluate"

_HOOKS = {
    "trainingtrace": "every run writes its trace; remove this hook",
    "initlr learningratesetter": "set `lr` of model.optimizer",
    "decaylr lrscheduler learningratescheduler": _SCHEDULER,
    "decaylronplateau reducelronplateau": _PLATEAU,
    "earlystoppingcallback earlystoppinghook finishifnoimprovementafter thresholdearlystopping": _STOPPING,
    "gradientclipping gradnormclip gradvalueclip gradientclip clipgradnorm clipgradvalue stepclipping": _CLIPPING,
    "gradientaccumulation gradientaccumulationscheduler": _ACCUMULATION,
    "gradnormlogger loggradnorm logparamnorm gradientnorm weightnorm": _NORMS,
    "freezelayers freezeparameters basefinetuning backbonefinetuning finetuning": _FREEZING,
    "ema emahook emacallback weightaveraging swa stochasticweightaveraging": _AVERAGES,
    "paramscheduler paramschedulerhandler weightdecayscheduler momentumscheduler schedulehyperparameter": _NUMBERS,
    "modelcheckpoint checkpoint checkpointhook checkpointsaver checkpointer modelsaver": _SAVING,
    "modeliterationcheckpoint modeltrainendsave trackthebest": _SAVING,
    "learningratemonitor lrmonitor": _RATE,
    "tensorboard tensorboardlogger tensorboardcallback": _BOARD,
    "tensorboardtrainbatchloss tensorboardtrainhistorymetric tensorboardfulltracking": _BOARD,
    "modeltrainhistoryplot": _BOARD,
    "wandb wandblogger wandbcallback wandbtracking mlflow mlflowlogger mlflowcallback": _TRACKER,
    "cometlogger neptunelogger": _TRACKER,
    "csvlogger historyfilewriter modeltrainhistoryfilewriter": "use the hook WriteCSV",
    "progressbar tqdmprogressbar richprogressbar progbarlogger tqdm": "use the hook ShowProgress",
    "terminateonnan nanstopper": "use the hook StopOnNaN",
    "finishafter maxepochs timer": "use the hook StopAfter",
    "learningratefinder lrfinder lrfind mixup sam": _RECIPES,
    "backupandrestore modelloadcontinuetraining": _RESUME,
    "logdir": "every run prints its directory; remove this hook",
    "simpleextension compositeextension predicate functionontrainloop": _OWN_EVENTS,
    "listregisteredcallbacks": "`emrun check CONFIG` lists the hooks; remove this one",
    "allpredictionssame": "use the hook Diagnose, which warns of outputs that are the same for all examples",
    "datasubsettestrun": "set main_loop.overfit, the number of batches; `emrun check CONFIG` tries one",
    "emailnotification logupload": _RECIPES,
    "distributedsamplersetepoch inmultiprocessdataload": "remove this hook: `ctx` of streams has epoch and worker",
    "gradientstatsprint": _NORMS,
    "graddistributionplot": "a hook of your own can give a histogram to `main_loop.show`",
    "trainhistoryformatter metrichistoryrename": f"{_OWN_HOOK} change `epoch_data` in `after_epoch`",
    "modelperformanceevaluation modelperformanceprintreport": "use the hook ClassificationMetrics",
    "datastreammonitoring trainingdatamonitoring": "use the hook ComputeStats, and main_loop.extra_streams",
    "extendedevaluation": _INTERVAL,
    "sharedvariablemodifier": _NUMBERS,
    "load": f"{_INITIAL}; {_RESUME}",
    "printing": "use the hook LogVariables",
    "timing": "use the hook LogProfile; metrics.jsonl has the seconds of each epoch",
    "timestamp filelogger": "train.log, trace.yaml and metrics.jsonl have what this hook writes; remove it",
    "jaxprofiler profiler profilerhook pytorchprofiler": "use the hook Profile",
    "everynepoch": "hooks of emrun have `every: 5 epochs`; a hook of your own asks `epoch_id % 5` in after_epoch",
}
_KEYS = {
    "accumulategradbatches gradientaccumulationsteps gradaccumsteps accumulate accumulation": _ACCUMULATION,
    "gradientclipval gradientclipalgorithm maxgradnorm clipgradnorm gradclip clipgradients gradclipnorm": _CLIPPING,
    "mixedprecision amp fp16 bf16 tf32 useamp autocast allowtf32": _PRECISION,
    "torchcompile compilemodel jitcompile torchcompilebackend torchcompilemode": _COMPILE,
    "gradientcheckpointing activationcheckpointing usecheckpoint": _RECOMPUTE,
    "channelslast": "set model.memory_format: channels_last",
    "earlystopping patience earlystoppingpatience": _STOPPING,
    "ema emadecay swa": _AVERAGES,
    "loggradnorm loggradientnorm logparamnorm trackgradnorm": _NORMS,
    "freeze frozen freezelayers freezeencoder freezebackbone": _FREEZING,
    "devices gpus ngpus numgpus numnodes strategy ddp distributed": _ONE_DEVICE,
    "resume resumefrom resumefromcheckpoint": _RESUME,
    "restorefrom ckptpath loadfrom checkpointpath loadcheckpoint": _RESTORE,
    "pretrained pretrainedmodel pretrainedpath pretrainedweights weights initweights initcheckpoint": _INITIAL,
    "checkpoint savesteps savestrategy saveevery checkpointcallback enablecheckpointing": f"use hooks: {_SAVING}",
    "savetotallimit savetopk": f"use `keep` of a hook: {_SAVING}",
    "valcheckinterval checkvaleverynepoch evalsteps evalevery validateevery validationfreq": _INTERVAL,
    "limittrainbatches stepsperepoch": "main_loop.fixed_epoch_size is the number of batches of an epoch",
    "limitvalbatches limittestbatches evaliters validationsteps maxevalbatches": _PART,
    "overfitbatches overfitsinglebatch": "use main_loop.overfit, the number of batches",
    "logger loggers reportto": "use WriteTensorBoard, WriteMLflow, WriteWandb, WriteTrackio, WriteCSV, ...",
    "logeverynsteps loggingsteps": "use the hook LogVariables: {every: 50 updates}, or WriteCSV: {every: 50 updates}",
    "enableprogressbar progressbar": "use the hook ShowProgress",
    "fastdevrun numsanityvalsteps": "`emrun check CONFIG` tries a batch of each stream without training",
    "trainloader valloader traindataloader valdataloaders evaldataset traindataset": _STREAMS,
    "monitor metricforbestmodel greaterisbetter": _COMPARED,
    "warmup warmupsteps numwarmupsteps warmupratio warmupepochs lrwarmup lrscheduler lrschedulertype": _SCHEDULER,
    "predict": "use `emrun predict RUN_DIR STREAM -o FILE`; settings of a stream go to eval.STREAM",
    "gridsearch hyperparametersearch hpsearch tuner optuna": "set sweep.parameters; `emrun sweep CONFIG` tries them",
    "shuffle": "the dataset decides the order: `ctx.batches(..., shuffle=True)`",
    "autoscalebatchsize autofindbatchsize": "set model.micro_batch_size: auto, which splits batches that do not fit",
    "batchsize": "the dataset makes the batches; set `batch_size` under dataset if its class has that argument",
}
_RESTARTS = "write {class: Cosine, cycles: 3, warmup: 5%}"
_FINAL = "write {class: Cosine, warmup: 5%, final: 0.1}"
_SCHEDULES = {
    "onecycle onecyclepolicy 1cycle": (
        "write {class: Cosine, warmup: 30%}, which also rises and falls once, or torch's OneCycleLR, step_on: update"
    ),
    "wsd warmupstabledecay trapezoidal trapezoid": "write {class: Constant, warmup: 5%, cooldown: 20%}",
    "constantwithwarmup warmupconstant warmup warmuplr linearwarmup": "write {class: Constant, warmup: 5%}",
    "linearwithwarmup linearwarmupdecay warmuplinear lineardecay": "write {class: Linear, warmup: 5%}",
    "cosinewithwarmup cosinewarmup warmupcosine linearwarmupcosineannealing linearwarmupcosineannealinglr": _FINAL,
    "cosinewithminlr cosinewarmupwithminlr cosinedecay cosineannealing cosinelr cosinelrscheduler": _FINAL,
    "cosinewithrestarts cosinewithhardrestarts cosinerestarts sgdr": _RESTARTS,
    "polynomialdecay polynomialwithwarmup poly polylr": "write {class: Polynomial, power: 2.0, warmup: 5%}",
    "exponentialdecay": "write {class: Exponential, final: 0.01}",
    "inversesqrtlr inversesquareroot rsqrt noam noamlr": "write {class: InverseSqrt, warmup: 500 updates}",
    "multistep multisteps piecewiseconstant stepdecay": "write {class: Steps, milestones: [50%, 75%], gamma: 0.1}",
    "greedy plateau": "write {class: ReduceLROnPlateau, metric: valid/loss/mean}",
}
_PRECISIONS = {
    "16 16-mixed fp16-mixed 16-true half float16": "write fp16, which scales the loss, or bf16, which does not need to",
    "bf16-mixed bf16-true bfloat16": "write bf16",
    "mixed amp auto true": "write bf16 or fp16",
    "32": "write it without quotes",
    "fp32 float32 32-true single full no": "write 32",
    "64 64-true fp64 float64 double": "write 32, and make the module one of float64: self.double() in its constructor",
}
_TABLES = {"hook": _HOOKS, "key": _KEYS, "schedule": _SCHEDULES, "precision": _PRECISIONS}


def instead(name: str, kind: str) -> str | None:
    """Return advice for a name that emloop or another tool uses and emrun does not, None for an unknown name.

    Args:
        name: the name in the config.
        kind: `hook` for the class of a hook, `key` for a key of a config, `schedule` for the class of a scheduler,
            or an argument, for its value.
    """
    table = _TABLES.get(kind, {})
    return next((advice for names, advice in table.items() if normalised(name) in names.split()), None)


def nearest_class(name: str, members: Iterable[str]) -> str | None:
    """Return the class of a torch package that a name may mean: `AdamOptimizer` means Adam, `mse` means MSELoss."""
    members = [each for each in members if each not in ("Module", "Optimizer", "LRScheduler")]
    bare = normalised(name)
    for ending in ("optimizer", "scheduler", "loss", "layer"):
        bare = bare.removesuffix(ending) or bare
    for ending in ("", "loss", "lr", "d"):
        found = next((each for each in members if normalised(each) == f"{bare}{ending}"), None)
        if found is not None:
            return found
    return sure(bare, members) or nearest(name, members)


class NotThere(LookupError):
    """A name in a config that does not exist or is ambiguous."""


class NoModule(NotThere):
    """A module that does not exist."""

    def __init__(self, module: str) -> None:
        self.module = module
        entries = list(Path.cwd().iterdir()) if "." not in module else []
        near = did_you_mean(module, [each.stem for each in entries if each.suffix == ".py" or each.is_dir()])
        where = "looked for in the current directory, then among installed packages"
        more = "" if near else "; to look in another folder, set code_directory"
        super().__init__(f"no module {module!r}{near} ({where}{more})")


@functools.cache
def built_ins(kind: str) -> Mapping[str, Path]:
    """Return the built-in classes of a kind: short name in the form of `normalised` -> the file named after the class.

    Args:
        kind: `hook`, `dataset` or `model`; other kinds have no built-in classes.
    """
    files = sorted(_HOUSE.glob(_FILES[kind])) if kind in _FILES else []
    return {normalised(path.stem): path for path in files}


def class_in(path: Path) -> str | None:
    """Return the name of the class that a file is named after, None when the file has no such class."""
    found = _class_definition(path)
    return found.name if found else None


def documentation(name: str, kind: str = "hook") -> str:
    """Return the docstring of a built-in, read from its file."""
    found = _class_definition(built_ins(kind)[normalised(name)])
    return (found and ast.get_docstring(found)) or ""


@functools.cache
def _class_definition(path: Path) -> ast.ClassDef | None:
    classes = (each for each in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(each, ast.ClassDef))
    return next((each for each in classes if normalised(each.name) == normalised(path.stem)), None)


def plugins(kind: str) -> dict[str, list[str]]:
    """Return the classes of a kind in installed packages: short name as the package writes it -> dotted paths.

    Packages declare them in the entry-point groups `emrun.hooks`, `emrun.datasets` and `emrun.models`; nothing is
    imported. A name that several packages provide has several paths.
    """
    if kind not in _FILES:
        return {}
    from importlib.metadata import entry_points  # takes 65 ms, and most configs do not need it

    found: dict[str, tuple[str, list[str]]] = {}
    for entry in entry_points(group=f"emrun.{kind}s"):
        path = entry.value.partition("[")[0].strip().replace(":", ".")
        _, paths = found.setdefault(normalised(entry.name), (entry.name, []))
        if path not in paths:
            paths.append(path)
    return dict(found.values())


def dotted_path(name: str, kind: str) -> str | None:
    """Return the dotted path of a short name of a kind, None when no class has the name.

    Raises:
        NotThere: several packages provide the name.
    """
    file = built_ins(kind).get(normalised(name))
    if file is not None:
        return f"{_HOUSE.name}.{file.parent.name}.{file.stem}.{class_in(file)}"
    paths = next((paths for each, paths in plugins(kind).items() if normalised(each) == normalised(name)), [])
    if len(paths) > 1:
        raise NotThere(f"several packages provide {kind} {name!r}: {', '.join(paths)}; write one of these dotted paths")
    return paths[0] if paths else None


def same_class(one: Any, other: Any) -> bool:
    """Return whether two values of `class` name the same class, as far as can be known without an import.

    Short names are compared ignoring case and underscores, dotted paths exactly. A dotted path equals a short name when
    the name can only mean that path: a class of emrun, of `torch.optim` or of a plugin.
    """
    if not (isinstance(one, str) and isinstance(other, str)):
        return bool(one == other)
    dotted = [name for name in (one, other) if "." in name]
    if len(dotted) == 2:
        return one == other
    if not dotted:
        return normalised(one) == normalised(other)
    short = normalised(next(name for name in (one, other) if name not in dotted))
    if dotted[0].startswith(("emrun.", "torch.optim.")):
        return normalised(dotted[0].rpartition(".")[2]) == short
    found = (entry for kind in _FILES for entry in plugins(kind).items())
    return any(normalised(name) == short and paths == dotted for name, paths in found)


def short_names(kind: str, *, installed: bool = True) -> list[str]:
    """Return the short names of a kind in their usual spelling.

    Args:
        kind: `hook`, `dataset` or `model`.
        installed: include names from installed packages, which come last.
    """
    return [*filter(None, map(class_in, built_ins(kind).values())), *(plugins(kind) if installed else ())]


def no_dotted_path(path: str) -> NotThere:
    """Return the error for a string that is not a dotted path."""
    return NotThere(f"{path!r} is not a dotted path such as my_module.MyClass")


def beside_config(error: NotThere, source: str) -> str:
    """Return advice when a module that was not found is in the folder of the config, otherwise an empty string.

    Args:
        error: the error that was raised.
        source: the file of the config, as in `Position.source`.
    """
    folder = Path(source).parent.resolve()
    file = _file_of(error.module, folder) if isinstance(error, NoModule) else None
    if file is None or folder == Path.cwd() or not Path(source).is_file():
        return ""
    return (
        f"; {file.relative_to(folder)} is in the folder of the config: set code_directory: {folder}, or run emrun there"
    )


def _file_of(module: str, folder: Path) -> Path | None:
    """Return the file of a module in a folder, None when the folder does not have the module."""
    files = (folder / f"{module}.py", folder / module / "__init__.py")
    return next((each for each in files if each.is_file()), None)


def _hidden(module: str) -> tuple[Path, str] | None:
    """Return the user's file of a module that another module hides, and the place of the latter; None if not hidden."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return None
    for folder in map(Path, sys.path):
        other = _file_of(module, folder.resolve())
        is_installed = any(folder.is_relative_to(home) for home in INSTALLED)
        if other is not None and not is_installed and other.resolve() != Path(spec.origin).resolve():
            return other, "built into Python" if spec.origin in ("built-in", "frozen") else f"at {spec.origin}"
    return None


INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""The directories of the standard library and of installed packages."""


def no_member(path: str, owner: str, file: str | None, name: str, members: Iterable[str]) -> NotThere:
    """Return the error for a name that is missing in a module or class.

    Args:
        path: the dotted path in the config.
        owner: the name of the module or class.
        file: the file of the module.
        name: the name that is missing.
        members: the names that exist.
    """
    hidden = _hidden(path.partition(".")[0])
    if hidden is not None:
        own, where = hidden
        own = own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own
        return NotThere(
            f"{path}: {own} is hidden by the module of the same name {where}, which has no {name!r}; rename {own}"
        )
    near = did_you_mean(name, [each for each in members if not each.startswith("_")])
    return NotThere(f"{path}: {owner}{f' (found at {file})' if file else ''} has no {name!r}{near}")
