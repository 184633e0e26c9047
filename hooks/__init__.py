"""The built-in hooks; importing a hook imports only its file.

May import: the root, `base`, `ranks`, `storage`, `record`.
"""

from emrun.base.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
