"""The built-in datasets; importing a dataset imports only its file.

May import: the root, `base`, `streams`, `storage`.
"""

from emrun.base.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
