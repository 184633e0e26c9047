# The public names, each with its module; `emrun.base.lazy` reads them, and type checkers do.

from emrun.base.types import Factory as Factory
from emrun.base.types import Interval as Interval
from emrun.config.config import load_config as load_config
from emrun.dataset import AbstractDataset as AbstractDataset
from emrun.exports.export import export as export
from emrun.hook import AbstractHook as AbstractHook
from emrun.hook import TrainingAborted as TrainingAborted
from emrun.hook import TrainingTerminated as TrainingTerminated
from emrun.hook import UpdateSkipped as UpdateSkipped
from emrun.loop.main_loop import MainLoop as MainLoop
from emrun.model import AbstractModel as AbstractModel
from emrun.models.torch_model import TorchModel as TorchModel
from emrun.ranks.gather import all_gather as all_gather
from emrun.record.step_columns import read_steps as read_steps
from emrun.training.build import Training as Training
from emrun.training.create import create_dataset as create_dataset
from emrun.training.create import create_hooks as create_hooks
from emrun.training.create import create_model as create_model
from emrun.training.create import create_training as create_training
from emrun.training.evaluate import evaluate as evaluate
from emrun.training.evaluate import load_run as load_run
from emrun.training.predict import predict as predict
from emrun.training.resume import resume_training as resume_training

__version__: str
