"""The built-in hooks; importing a hook imports only its file."""

from typing import TYPE_CHECKING

from emrun.base.lazy import lazy_names

if TYPE_CHECKING:
    from emrun.hooks._tracker import AbstractTracker as AbstractTracker
    from emrun.hooks.accumulate_variables import AccumulateVariables as AccumulateVariables
    from emrun.hooks.average_weights import AverageWeights as AverageWeights
    from emrun.hooks.benchmark import Benchmark as Benchmark
    from emrun.hooks.check import Check as Check
    from emrun.hooks.classification_metrics import ClassificationMetrics as ClassificationMetrics
    from emrun.hooks.clip_gradients import ClipGradients as ClipGradients
    from emrun.hooks.compute_stats import ComputeStats as ComputeStats
    from emrun.hooks.diagnose import Diagnose as Diagnose
    from emrun.hooks.early_stopping import EarlyStopping as EarlyStopping
    from emrun.hooks.flatten import Flatten as Flatten
    from emrun.hooks.freeze import Freeze as Freeze
    from emrun.hooks.log_norms import LogNorms as LogNorms
    from emrun.hooks.log_profile import LogProfile as LogProfile
    from emrun.hooks.log_variables import LogVariables as LogVariables
    from emrun.hooks.logits_to_csv import LogitsToCsv as LogitsToCsv
    from emrun.hooks.on_plateau import OnPlateau as OnPlateau
    from emrun.hooks.plot_lines import PlotLines as PlotLines
    from emrun.hooks.profile import Profile as Profile
    from emrun.hooks.save_best import SaveBest as SaveBest
    from emrun.hooks.save_confusion_matrix import SaveConfusionMatrix as SaveConfusionMatrix
    from emrun.hooks.save_every import SaveEvery as SaveEvery
    from emrun.hooks.save_examples import SaveExamples as SaveExamples
    from emrun.hooks.save_file import SaveFile as SaveFile
    from emrun.hooks.save_latest import SaveLatest as SaveLatest
    from emrun.hooks.save_masks import SaveMasks as SaveMasks
    from emrun.hooks.save_predictions import SavePredictions as SavePredictions
    from emrun.hooks.sequence_to_csv import SequenceToCsv as SequenceToCsv
    from emrun.hooks.set_over_time import SetOverTime as SetOverTime
    from emrun.hooks.show_progress import ShowProgress as ShowProgress
    from emrun.hooks.skip_spike import SkipSpike as SkipSpike
    from emrun.hooks.stop_after import StopAfter as StopAfter
    from emrun.hooks.stop_on_nan import StopOnNaN as StopOnNaN
    from emrun.hooks.stop_on_plateau import StopOnPlateau as StopOnPlateau
    from emrun.hooks.write_csv import WriteCSV as WriteCSV
    from emrun.hooks.write_mlflow import WriteMLflow as WriteMLflow
    from emrun.hooks.write_sqlite import WriteSQLite as WriteSQLite
    from emrun.hooks.write_tensorboard import WriteTensorBoard as WriteTensorBoard
    from emrun.hooks.write_trackio import WriteTrackio as WriteTrackio
    from emrun.hooks.write_wandb import WriteWandb as WriteWandb

__getattr__, __dir__ = lazy_names(
    "emrun.hooks",
    {
        "AbstractTracker": "_tracker",
        "AccumulateVariables": "accumulate_variables",
        "AverageWeights": "average_weights",
        "Benchmark": "benchmark",
        "Check": "check",
        "ClassificationMetrics": "classification_metrics",
        "ClipGradients": "clip_gradients",
        "ComputeStats": "compute_stats",
        "Diagnose": "diagnose",
        "EarlyStopping": "early_stopping",
        "Flatten": "flatten",
        "Freeze": "freeze",
        "LogNorms": "log_norms",
        "LogProfile": "log_profile",
        "LogVariables": "log_variables",
        "LogitsToCsv": "logits_to_csv",
        "OnPlateau": "on_plateau",
        "PlotLines": "plot_lines",
        "Profile": "profile",
        "SaveBest": "save_best",
        "SaveConfusionMatrix": "save_confusion_matrix",
        "SaveEvery": "save_every",
        "SaveExamples": "save_examples",
        "SaveFile": "save_file",
        "SaveLatest": "save_latest",
        "SaveMasks": "save_masks",
        "SavePredictions": "save_predictions",
        "SequenceToCsv": "sequence_to_csv",
        "SetOverTime": "set_over_time",
        "ShowProgress": "show_progress",
        "SkipSpike": "skip_spike",
        "StopAfter": "stop_after",
        "StopOnNaN": "stop_on_nan",
        "StopOnPlateau": "stop_on_plateau",
        "WriteCSV": "write_csv",
        "WriteMLflow": "write_mlflow",
        "WriteSQLite": "write_sqlite",
        "WriteTensorBoard": "write_tensorboard",
        "WriteTrackio": "write_trackio",
        "WriteWandb": "write_wandb",
    },
)
