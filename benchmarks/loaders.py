"""Compare emrun's datasets with other loaders on the same images and rows.

    python benchmarks/loaders.py [--rounds 5] [--images 768] [--only files,bytes,crops,shards,shard_bytes,rows]

The script makes JPEG files of 500 x 375 pixels, stores them also as tar archives and in the formats of litdata and
mosaicml-streaming, and writes a table. Each loader decodes the images, resizes them to 224 x 224 and yields shuffled
batches of 64, with two threads or two worker processes, whatever suits it best of the two. `crops` resizes a random
part of each image, as torchvision's `RandomResizedCrop` draws it. First, all that a loader yields is compared with what
Pillow or NumPy reads; of random parts, only that each image comes once. Then each loader reads two passes in a process
of its own; the loaders alternate, and medians are printed as Markdown tables:

- images/s: of the second pass, with its beginning;
- share of the limit: of two processes that decode half of the images each and exchange nothing;
- CPU seconds for 1,000 images (rows: a million rows), of all processes;
- the seconds until the first batch of each pass, without imports;
- the largest sum of the memory of all processes; memory that they share counts once.

Loaders that are not installed are named and left out; `make bench-loaders` installs all of them.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import json
import math
import multiprocessing
import os
import platform
import random
import resource
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

SIZE, BATCH, READERS, SHARDS, QUALITY = 224, 64, 2, 4, 90
ROWS, COLUMNS, ROWS_BATCH = 1_000_000, 16, 256
SAMPLED, LONGEST = 0.1, 300.0  # seconds between two looks at the memory; seconds of a process
LONGEST_SIDE = math.log(4 / 3)
LIMIT, CROPS = "two bare loops", "crops"
PACKAGES = ("torch", "torchdata", "webdataset", "litdata", "mosaicml-streaming", "spdl-core", "pillow", "numpy")
Batches = Callable[[], Iterable[tuple[Any, Any]]]
"""Begins a pass, and returns batches of images or rows and their numbers."""


def decoded(source: Any, dtype: str) -> np.ndarray:
    """Return an image of shape (3, SIZE, SIZE): float32 in [0, 1], or uint8; for `CROPS`, float32 of a random part."""
    from PIL import Image

    with Image.open(source if isinstance(source, Path) else io.BytesIO(source)) as image:
        box = random_part(*image.size) if dtype == CROPS else None
        resized = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR, box)
    return scaled(np.asarray(resized).transpose(2, 0, 1), dtype)


def random_part(width: int, height: int) -> tuple[int, int, int, int] | None:
    """Return a box of 0.08 to 1 of the area and a ratio of 3/4 to 4/3; None, the whole image, if none of ten fits."""
    for _ in range(10):
        area, ratio = width * height * random.uniform(0.08, 1), math.exp(random.uniform(-LONGEST_SIDE, LONGEST_SIDE))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if wide <= width and high <= height:
            left, top = random.randint(0, width - wide), random.randint(0, height - high)
            return left, top, left + wide, top + high
    return None


def scaled(pixels: np.ndarray, dtype: str) -> np.ndarray:
    """Return bytes as they are, in one piece, or as float32 in [0, 1]."""
    return np.ascontiguousarray(pixels) if dtype == "uint8" else np.divide(pixels, np.float32(255), order="C")


def digest(values: np.ndarray) -> str:
    """Return a checksum of the bytes of an image."""
    return f"{values.dtype} {hashlib.sha1(values.tobytes(), usedforsecurity=False).hexdigest()}"


# The data


def files_of(place: Path) -> list[Path]:
    """Return the images; the place in the list is the number of an image."""
    return sorted((place / "files" / "a").iterdir())


def make_data(place: Path, count: int) -> None:
    """Write the images as files and as tar archives, and the table."""
    from PIL import Image

    (place / "files" / "a").mkdir(parents=True)
    (place / "tars").mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse, fine = (rng.integers(0, 256, (*shape, 3), np.uint8) for shape in ((6, 8), (75, 100)))
        layers = [Image.fromarray(each).resize((500, 375), Image.Resampling.BICUBIC) for each in (coarse, fine)]
        path = place / "files" / "a" / f"{number:06}.jpg"
        Image.blend(*layers, 0.3).save(path, quality=QUALITY)
        with tarfile.open(place / "tars" / f"{number * SHARDS // count}.tar", "a") as archive:
            archive.add(path, f"{number:06}.jpg")
            info = tarfile.TarInfo(f"{number:06}.cls")
            info.size = len(str(number))
            archive.addfile(info, io.BytesIO(str(number).encode()))
    digests = {dtype: [digest(decoded(path, dtype)) for path in files_of(place)] for dtype in ("float32", "uint8")}
    (place / "digests.json").write_text(json.dumps(digests))
    np.save(place / "x.npy", rng.standard_normal((ROWS, COLUMNS), np.float32))
    np.save(place / "number.npy", np.arange(ROWS))


def make_chunks(place: Path) -> None:
    """Write the images in litdata's format."""
    import litdata

    inputs = list(enumerate(map(str, files_of(place))))
    litdata.optimize(
        _chunk_entry,
        inputs,
        str(place / "chunks"),
        chunk_bytes="16MB",
        num_workers=1,
        start_method="fork",
        verbose=False,
    )


def _chunk_entry(entry: tuple[int, str]) -> dict[str, Any]:
    return {"number": entry[0], "image": Path(entry[1]).read_bytes()}


def make_mds(place: Path) -> None:
    """Write the images in the format of mosaicml-streaming."""
    from streaming import MDSWriter

    with MDSWriter(out=str(place / "mds"), columns={"number": "int", "image": "bytes"}, size_limit="16mb") as writer:
        for number, path in enumerate(files_of(place)):
            writer.write({"number": number, "image": path.read_bytes()})


# The loaders


def of_emrun(dataset: Any, source: str, number: str, **how: Any) -> Batches:
    """Return the batches of a dataset, read by a `StreamWrapper` as in training."""
    from emrun.streams.reading import Reading
    from emrun.streams.stream import StreamWrapper

    stream = StreamWrapper(dataset.train_stream, name="train", reading=Reading(**how).of(dataset))

    def batches() -> Iterator[tuple[Any, Any]]:
        with stream:
            for batch in stream:
                yield batch[source], batch[number]

    return batches


def emrun_files(place: Path, dtype: str, **how: Any) -> Batches:
    from emrun.datasets import ImageFolder

    form = {"crop": "random"} if dtype == CROPS else {"dtype": dtype}
    dataset = ImageFolder(place / "files", size=SIZE, batch_size=BATCH, **form)
    return of_emrun(dataset, "image", "position", **how)


def emrun_shards(place: Path, dtype: str, **how: Any) -> Batches:
    from emrun.datasets import TarShards

    sources = {"image": "jpg", "number": "cls"}
    dataset = TarShards(str(place / "tars" / "*.tar"), sources, size=SIZE, batch_size=BATCH, dtype=dtype)
    return of_emrun(dataset, "image", "number", **how)


def emrun_rows(place: Path, dtype: str) -> Batches:
    from emrun.datasets import Table

    dataset = Table({"x": place / "x.npy", "number": place / "number.npy"}, batch_size=ROWS_BATCH)
    return of_emrun(dataset, "x", "number")


class Files:
    """The images as a map-style dataset."""

    def __init__(self, place: Path, dtype: str) -> None:
        self.paths, self.dtype = files_of(place), dtype

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        return decoded(self.paths[number], self.dtype), number


class Rows:
    """The table as a map-style dataset, asked for a batch at a time."""

    def __init__(self, place: Path) -> None:
        import torch

        self.x, self.numbers = (torch.from_numpy(np.load(place / f"{name}.npy")) for name in ("x", "number"))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: Any) -> tuple[Any, Any]:
        return self.x[rows], self.numbers[rows]


def torch_files(place: Path, dtype: str) -> Batches:
    from torch.utils.data import DataLoader

    return DataLoader(Files(place, dtype), BATCH, shuffle=True, num_workers=READERS).__iter__


def torch_rows(place: Path, dtype: str) -> Batches:
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    rows = Rows(place)
    return DataLoader(rows, batch_size=None, sampler=BatchSampler(RandomSampler(rows), ROWS_BATCH, False)).__iter__


def nodes_files(place: Path, dtype: str) -> Batches:
    import torchdata.nodes as nodes
    from torch.utils.data import RandomSampler, default_collate

    files = Files(place, dtype)
    read = nodes.ParallelMapper(
        nodes.SamplerWrapper(RandomSampler(files)), files.__getitem__, num_workers=READERS, method="thread"
    )
    batched = nodes.Mapper(nodes.Batcher(read, BATCH, drop_last=False), default_collate)
    return nodes.Loader(nodes.Prefetcher(batched, 4)).__iter__


def nodes_rows(place: Path, dtype: str) -> Batches:
    import torchdata.nodes as nodes
    from torch.utils.data import BatchSampler, RandomSampler

    rows = Rows(place)
    sampler = nodes.SamplerWrapper(BatchSampler(RandomSampler(rows), ROWS_BATCH, False))
    return nodes.Loader(nodes.Mapper(sampler, rows.__getitem__)).__iter__


def spdl_files(place: Path, dtype: str) -> Batches:
    """Return SPDL's pipeline with Pillow: its own decoder needs the libraries of FFmpeg."""
    from spdl.pipeline import PipelineBuilder
    from torch.utils.data import default_collate

    files, rng = Files(place, dtype), np.random.default_rng(0)

    def batches() -> Iterator[tuple[Any, Any]]:
        order = rng.permutation(len(files)).tolist()
        builder = PipelineBuilder().add_source(order).pipe(files.__getitem__, concurrency=READERS)
        pipeline = builder.aggregate(BATCH).pipe(default_collate).add_sink(4).build(num_threads=READERS + 1)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()

    return batches


def webdataset_shards(place: Path, dtype: str) -> Batches:
    import webdataset

    data = webdataset.WebDataset(sorted(map(str, (place / "tars").glob("*.tar"))), shardshuffle=SHARDS)
    decode = partial(decoded, dtype=dtype)
    data = data.shuffle(1000).to_tuple("jpg", "cls").map_tuple(decode, int).batched(BATCH)
    return webdataset.WebLoader(data, batch_size=None, num_workers=READERS).__iter__


def litdata_chunks(place: Path, dtype: str) -> Batches:
    import litdata

    class Decoded(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[np.ndarray, int]:
            found = super().__getitem__(index)
            return decoded(found["image"], dtype), found["number"]

    data = Decoded(str(place / "chunks"), shuffle=True)
    return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=READERS).__iter__


def mosaic_mds(place: Path, dtype: str) -> Batches:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    class Decoded(StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[np.ndarray, int]:
            found = super().__getitem__(index)
            return decoded(found["image"], dtype), found["number"]

    data = Decoded(local=str(place / "mds"), shuffle=True, batch_size=BATCH)
    return DataLoader(data, batch_size=BATCH, num_workers=READERS).__iter__


def bare_files(place: Path, dtype: str) -> Batches:
    """Decode half of the images in each of two processes; no image leaves its process."""
    paths = files_of(place)

    def half(first: int) -> None:
        out = np.empty((BATCH, 3, SIZE, SIZE), "uint8" if dtype == "uint8" else "float32")
        for place_, path in enumerate(paths[first::READERS]):
            out[place_ % BATCH] = decoded(path, dtype)

    def batches() -> Iterator[tuple[Any, Any]]:
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=half, args=(first,)) for first in range(READERS)]
        for each in processes:
            each.start()
        for each in processes:
            each.join()
        yield paths, None

    return batches


OF_FILES = {
    LIMIT: bare_files,
    "emrun, threads": emrun_files,
    "emrun, `workers: 2`": partial(emrun_files, workers=READERS),
    "torch DataLoader": torch_files,
    "torchdata.nodes, threads": nodes_files,
    "SPDL, threads": spdl_files,
}
OF_SHARDS = {
    LIMIT: bare_files,
    "emrun TarShards, threads": emrun_shards,
    "webdataset": webdataset_shards,
    "litdata": litdata_chunks,
    "mosaicml-streaming": mosaic_mds,
}
GROUPS: dict[str, tuple[str, str, dict[str, Callable[..., Batches]]]] = {
    "files": ("JPEG files to float32", "float32", OF_FILES),
    "bytes": ("JPEG files to uint8", "uint8", OF_FILES),
    CROPS: ("Random parts of JPEG files to float32", CROPS, OF_FILES),
    "shards": ("The same images in archives, to float32", "float32", OF_SHARDS),
    "shard_bytes": ("The same images in archives, to uint8", "uint8", OF_SHARDS),
    "rows": (
        f"Rows of {COLUMNS} float32 in memory, batches of {ROWS_BATCH}, without threads and workers",
        "float32",
        {"emrun Table": emrun_rows, "torch DataLoader, BatchSampler": torch_rows, "torchdata.nodes": nodes_rows},
    ),
}
MAKERS = {"litdata": make_chunks, "mosaicml-streaming": make_mds}
"""Loader -> what writes the images in its format."""
PLACES = {"litdata": "chunks", "mosaicml-streaming": "mds"}
"""Loader -> the folder that this makes."""


# In a process of its own


class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules for packages that are imported, but not needed: clients of clouds, and models of text."""

    NAMES = frozenset(("azure", "boto3", "botocore", "google", "matplotlib", "oci", "torchvision", "transformers"))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        wanted = name.partition(".")[0] in self.NAMES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = self.attribute
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty."""

    @staticmethod
    def attribute(name: str) -> type:
        """Return a class for any name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(batches: Batches) -> dict[str, float]:
    """Read two passes."""
    began_cpu, firsts, seconds, total = cpu_seconds(), [], [], 0
    for _ in range(2):
        began, count, first = perf_counter(), 0, 0.0
        for data, _ in batches():
            first = first or perf_counter() - began
            count += len(data)
        seconds.append(perf_counter() - began)
        firsts.append(first)
        total += count
    used = cpu_seconds() - began_cpu
    return {"rate": count / seconds[1], "cpu": used / total, "first": firsts[0], "second": firsts[1]}


def compare_rows(batches: Batches, expected: np.ndarray) -> dict[str, Any]:
    """Compare all that a pass over the table yields with the table."""
    seen = np.zeros(len(expected), bool)
    for data, numbers in batches():
        seen[np.asarray(numbers)] = (np.asarray(data) == expected[np.asarray(numbers)]).all(axis=1)
    return {"seen": int(seen.sum()), "equal": int(seen.sum()), "most": 0.0, "mean": 0.0}


def compare(batches: Batches, place: Path, dtype: str) -> dict[str, Any]:
    """Compare all that a pass yields with Pillow's images, by checksums; distances are in grey levels, of 255."""
    seen, most, means = set(), 0.0, []
    if dtype == CROPS:
        seen.update(number for _, numbers in batches() for number in np.asarray(numbers).tolist())
        return {"seen": len(seen), "equal": 0, "most": 0.0, "mean": 0.0}
    wanted, paths = json.loads((place / "digests.json").read_text())[dtype], files_of(place)
    for data, numbers in batches():
        for found, number in zip(np.asarray(data), np.asarray(numbers).tolist(), strict=True):
            seen.add(number)
            if digest(found) != wanted[number]:
                off = abs(found.astype(np.float64) - decoded(paths[number], dtype)) * (1 if dtype == "uint8" else 255)
                most = max(most, off.max())
                means.append(off.mean())
    return {"seen": len(seen), "equal": len(seen) - len(means), "most": most, "mean": sum(means) / max(1, len(means))}


def child(group: str, name: str, place: Path, what: str) -> dict[str, Any]:
    """Do one thing with a loader: prepare its data, compare what it yields, or measure it."""
    sys.meta_path.append(Empty())
    import torch

    torch.set_num_threads(1)
    _, dtype, loaders = GROUPS[group]
    if what == "make":
        MAKERS[name](place)
        return {}
    batches = loaders[name](place, dtype)
    if what == "measure":
        return measure(batches)
    if group == "rows":
        return compare_rows(batches, np.load(place / "x.npy"))
    return compare(batches, place, dtype)


# The process that starts the others


def run(group: str, name: str, place: Path, what: str) -> dict[str, Any]:
    """Run this script in another process; return its result, with the largest memory of all its processes.

    Raises:
        RuntimeError: the process failed.
    """
    import psutil

    from emrun.base.cores import SHARE

    words = [sys.executable, "-W", "ignore", __file__, "--child", group, name, str(place), what]
    environment = {**os.environ, SHARE: str(READERS), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, stdout=out, stderr=errors, env=environment, start_new_session=True)
        peak, began = 0, perf_counter()
        while process.poll() is None:
            sleep(SAMPLED)
            if perf_counter() - began > LONGEST:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise RuntimeError(f"it takes more than {LONGEST:.0f} s")
            used = 0
            try:
                own = psutil.Process(process.pid)
                for each in (own, *own.children(recursive=True)):
                    used += each.memory_full_info().pss
            except psutil.Error:  # it has just ended
                continue
            peak = max(peak, used)
        out.seek(0)
        errors.seek(0)
        lines, said = out.read().splitlines(), errors.read().strip().splitlines()
    if process.returncode:
        raise RuntimeError(said[-1] if said else f"exit status {process.returncode}")
    return {**json.loads(lines[-1]), "memory": peak / 1e6}


def content(group: str, name: str, place: Path, count: int) -> str:
    """Prepare the data of a loader, compare all that it yields, and return what was found.

    Raises:
        RuntimeError: a process failed, or the loader does not yield all examples.
    """
    if name in MAKERS and not (place / PLACES[name]).exists():
        run(group, name, place, "make")
    found = run(group, name, place, "compare")
    whole = ROWS if group == "rows" else count
    if found["seen"] != whole:
        raise RuntimeError(f"it yields {found['seen']:,} of {whole:,} examples")
    if group == CROPS:
        return "each image once"
    off = f"off by {found['mean']:.2g} on average, at most {found['most']:.0f} of 255"
    return "same bytes" if found["equal"] == whole else off


def show_table(group: str, rows: dict[str, list[dict[str, Any]]], contents: dict[str, str]) -> None:
    """Print the medians of a group as a Markdown table."""
    what = "rows" if group == "rows" else "images"
    each = 1_000_000 if group == "rows" else 1_000
    medians = {
        name: {key: statistics.median(row[key] for row in found) for key in found[0]} for name, found in rows.items()
    }
    limit = medians.get(LIMIT, {}).get("rate")
    print(f"\n{GROUPS[group][0]}:\n")
    print(f"|  | {what}/s | of the limit | CPU s for {each:,} | first batch, s | second pass, s | MB | content |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for name, row in medians.items():
        share = f"{row['rate'] / limit:.2f}" if limit else ""
        times = ("", "") if name == LIMIT else (f"{row['first']:.3f}", f"{row['second']:.3f}")
        cells = (f"{row['rate']:,.0f}", share, f"{row['cpu'] * each:.2f}", *times, f"{row['memory']:.0f}")
        print(f"| {name} | {' | '.join(cells)} | {contents.get(name, '')} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=768)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, separated by commas")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        group, name, place, what = arguments.child
        print(json.dumps(child(group, name, Path(place), what)), flush=True)
        return
    groups, began = arguments.only.split(","), perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_data(place, arguments.images)
        failed: dict[tuple[str, str], str] = {}
        contents: dict[str, dict[str, str]] = {group: {} for group in groups}
        rows: dict[str, dict[str, list[dict[str, Any]]]] = {group: {} for group in groups}
        plan = [(group, name) for group in groups for name in GROUPS[group][2]]
        for number in range(arguments.rounds + 1):
            for group, name in plan if number % 2 == 0 else reversed(plan):
                if (group, name) in failed:
                    continue
                try:
                    if number:
                        rows[group].setdefault(name, []).append(run(group, name, place, "measure"))
                    elif name != LIMIT:
                        contents[group][name] = content(group, name, place, arguments.images)
                except RuntimeError as error:
                    failed[group, name] = str(error)
                what = f"round {number}" if number else "comparison"
                print(f"{what}, {group}, {name}: {perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    for group in groups:
        names = [name for name in GROUPS[group][2] if (group, name) not in failed]
        show_table(group, {name: rows[group][name] for name in names}, contents[group])
    for (group, name), error in failed.items():
        print(f"\nLeft out of {group}: {name}: {error}")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES if _is_installed(name)]
    processor = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    print(
        f"\n{datetime.date.today()}, {os.cpu_count()} cores ({processor.partition(': ')[2]}), load "
        f"{os.getloadavg()[2]:.1f}, {platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"{', '.join(versions)}; {arguments.rounds} rounds of {arguments.images} images, {perf_counter() - began:.0f} s"
    )


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
