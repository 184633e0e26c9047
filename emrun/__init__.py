"""emrun trains PyTorch models from one YAML file."""

from emrun.base.lazy import lazy_names

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(__name__, __file__)
