# The public names, each with its module; `emrun.base.lazy` reads them, and type checkers do.

from emrun.datasets.digits import Digits as Digits
from emrun.datasets.downloadable_dataset import DownloadableDataset as DownloadableDataset
from emrun.datasets.hugging_face import HuggingFace as HuggingFace
from emrun.datasets.image_folder import ImageFolder as ImageFolder
from emrun.datasets.majority import Majority as Majority
from emrun.datasets.mixed import Mixed as Mixed
from emrun.datasets.parquet import Parquet as Parquet
from emrun.datasets.pictures import Pictures as Pictures
from emrun.datasets.table import Table as Table
from emrun.datasets.tar_shards import TarShards as TarShards
from emrun.datasets.token_windows import TokenWindows as TokenWindows
from emrun.datasets.torch_dataset import TorchDataset as TorchDataset
