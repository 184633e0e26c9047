"""emrun trains PyTorch models from one YAML file."""

from typing import TYPE_CHECKING

from emrun.lazy import lazy_names

if TYPE_CHECKING:
    from emrun.assembly import Training as Training
    from emrun.config import load_config as load_config
    from emrun.dataset import AbstractDataset as AbstractDataset
    from emrun.hook import AbstractHook as AbstractHook
    from emrun.hook import TrainingAborted as TrainingAborted
    from emrun.hook import TrainingTerminated as TrainingTerminated
    from emrun.main_loop import MainLoop as MainLoop
    from emrun.model import AbstractModel as AbstractModel
    from emrun.resuming import resume_training as resume_training
    from emrun.torch_model import TorchModel as TorchModel
    from emrun.training import create_dataset as create_dataset
    from emrun.training import create_hooks as create_hooks
    from emrun.training import create_model as create_model
    from emrun.training import create_training as create_training
    from emrun.training import evaluate as evaluate
    from emrun.training import load_run as load_run
    from emrun.types import Factory as Factory

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(
    "emrun",
    {
        "AbstractDataset": "dataset",
        "AbstractHook": "hook",
        "AbstractModel": "model",
        "Factory": "types",
        "MainLoop": "main_loop",
        "TorchModel": "torch_model",
        "Training": "assembly",
        "TrainingAborted": "hook",
        "TrainingTerminated": "hook",
        "create_dataset": "training",
        "create_hooks": "training",
        "create_model": "training",
        "create_training": "training",
        "evaluate": "training",
        "load_config": "config",
        "load_run": "training",
        "resume_training": "resuming",
    },
)
