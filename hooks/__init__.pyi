# The public names, each with its module; `emrun.base.lazy` reads them, and type checkers do.

# End a run
from emrun.hooks.check import Check as Check
from emrun.hooks.early_stopping import EarlyStopping as EarlyStopping
from emrun.hooks.on_plateau import OnPlateau as OnPlateau
from emrun.hooks.stop_after import StopAfter as StopAfter
from emrun.hooks.stop_on_nan import StopOnNaN as StopOnNaN
from emrun.hooks.stop_on_plateau import StopOnPlateau as StopOnPlateau

# Save checkpoints and files
from emrun.hooks.save_best import SaveBest as SaveBest
from emrun.hooks.save_every import SaveEvery as SaveEvery
from emrun.hooks.save_file import SaveFile as SaveFile
from emrun.hooks.save_latest import SaveLatest as SaveLatest

# Change the updates
from emrun.hooks.average_weights import AverageWeights as AverageWeights
from emrun.hooks.clip_gradients import ClipGradients as ClipGradients
from emrun.hooks.freeze import Freeze as Freeze
from emrun.hooks.mixup import Mixup as Mixup
from emrun.hooks.set_over_time import SetOverTime as SetOverTime
from emrun.hooks.skip_spike import SkipSpike as SkipSpike

# Statistics, and where the time goes
from emrun.hooks.accumulate_variables import AccumulateVariables as AccumulateVariables
from emrun.hooks.benchmark import Benchmark as Benchmark
from emrun.hooks.classification_metrics import ClassificationMetrics as ClassificationMetrics
from emrun.hooks.compute_stats import ComputeStats as ComputeStats
from emrun.hooks.diagnose import Diagnose as Diagnose
from emrun.hooks.log_norms import LogNorms as LogNorms
from emrun.hooks.log_profile import LogProfile as LogProfile
from emrun.hooks.log_variables import LogVariables as LogVariables
from emrun.hooks.profile import Profile as Profile
from emrun.hooks.show_progress import ShowProgress as ShowProgress

# Results of an evaluation
from emrun.hooks.flatten import Flatten as Flatten
from emrun.hooks.logits_to_csv import LogitsToCsv as LogitsToCsv
from emrun.hooks.plot_lines import PlotLines as PlotLines
from emrun.hooks.save_confusion_matrix import SaveConfusionMatrix as SaveConfusionMatrix
from emrun.hooks.save_examples import SaveExamples as SaveExamples
from emrun.hooks.save_masks import SaveMasks as SaveMasks
from emrun.hooks.save_predictions import SavePredictions as SavePredictions
from emrun.hooks.sequence_to_csv import SequenceToCsv as SequenceToCsv

# Files and trackers
from emrun.hooks.write_csv import WriteCSV as WriteCSV
from emrun.hooks.write_mlflow import WriteMLflow as WriteMLflow
from emrun.hooks.write_sqlite import WriteSQLite as WriteSQLite
from emrun.hooks.write_tensorboard import WriteTensorBoard as WriteTensorBoard
from emrun.hooks.write_trackio import WriteTrackio as WriteTrackio
from emrun.hooks.write_wandb import WriteWandb as WriteWandb

from emrun.record.trackers import AbstractTracker as AbstractTracker
