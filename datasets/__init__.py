"""The built-in datasets; importing one imports its file only."""

from typing import TYPE_CHECKING

from emrun.lazy import lazy_names

if TYPE_CHECKING:
    from emrun.datasets.digits import Digits as Digits
    from emrun.datasets.majority import Majority as Majority

__getattr__ = lazy_names("emrun.datasets", {"Digits": "digits", "Majority": "majority"})
