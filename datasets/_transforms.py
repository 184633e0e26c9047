"""Transforms of pictures, masks and boxes: built by name, seeded for each example, and checked.

A dataset reads `transform` and `augment` by `transforms_of`, which returns the transforms of evaluations and those of
training passes. Of an example, the dataset makes a mapping of sources to `tv_tensors`: `picture_of` makes the `Image`,
and a dataset with masks or boxes adds `tv_tensors.Mask` of shape (H, W) and `tv_tensors.BoundingBoxes`:

    transforms = self._transforms[trains]
    if transforms:
        values = {"image": picture_of(pixels), "mask": tv_tensors.Mask(mask)}
        values = transforms.apply(values, ctx, row)

All values of an example are turned together. With one value, a callable gets it alone; with several, the mapping.
`apply` may be called by several threads, unless `transforms.alone(ctx)`: then one thread reads all rows of a batch,
within `transforms.reading(ctx)`. `array_of` makes an array of the picture that the last transform returns, and
`transforms.together` a batch of these arrays.

With `ignore`, the pixels of a mask that a transform makes up, as a rotation does in the corners, have this value.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from emrun.base.arguments import check_keys
from emrun.base.encoding import GENERATORS, digest
from emrun.base.errors import ArgumentError, EmrunError, StreamError, needing
from emrun.base.lazy import prepare_torchvision
from emrun.base.randomness import preserved_randomness, seed_generators
from emrun.base.types import Named, Strings
from emrun.base.wording import did_you_mean, listed
from emrun.stream_context import Array, StreamContext

TransformForm = Sequence[str | Mapping[str, Any] | Callable[..., Any]] | None
"""The arguments `transform` and `augment` in a config: names of torchvision's transforms, or callables."""
Step = tuple[str, Callable[..., Any]]
"""Where a callable stands, such as `augment[0] (ColorJitter)`, and the callable."""
DRAWING = frozenset(
    (
        *("bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial"),
        *("normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
        *("random_", "randperm", "uniform_", "_sample_dirichlet", "_standard_gamma"),
    )
)
"""The functions of torch that draw random numbers from the generator that they are given."""
_REFUSED = frozenset(
    (
        *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_"),
        *("feature_dropout", "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout"),
        *("rrelu", "rrelu_", "gumbel_softmax"),
    )
)
_TRIED = 8, 2  # seeds with which the first example is tried, also in each worker process
_TRYING = threading.Lock()  # held while no other thread of this process may call a transform
_OF_BATCHES = ("MixUp", "CutMix")
ADVICE = "set main_loop.workers: 1 or more: each worker process seeds all global generators for each example"


class Transforms:
    """Callables that are applied to each example, one after the other, with random numbers of the example alone.

    In a worker process, the global generators of torch, NumPy and Python are seeded for each example. Elsewhere threads
    share them: functions of torch draw from a generator of the example, and a callable that changes a global generator
    is an error. The first example of a process is tried with several seeds, which finds such callables.

    Args:
        steps: the callables.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._is_tried = not steps
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the first example

    def __bool__(self) -> bool:
        return bool(self._steps)

    def alone(self, ctx: StreamContext) -> bool:
        """Return whether one thread must read all rows of a batch, because the global generators are seeded."""
        return bool(self._steps) and ctx.read_by == "worker"

    def reading(self, ctx: StreamContext) -> AbstractContextManager[None]:
        """Restore the global generators at the end of the block, if they are seeded in it."""
        return preserved_randomness() if self.alone(ctx) else nullcontext()

    def apply(self, values: Named, ctx: StreamContext, row: int) -> Named:
        """Return the values of an example as the callables return them.

        Args:
            values: source -> its `tv_tensors`; a callable may change them.
            ctx: the context of the pass.
            row: the number of the example, for its seed.

        Raises:
            StreamError: a callable raises an error, returns something else than such values, changes what it gets, or
                draws random numbers that are not those of the example.
        """
        seed = ctx.seed_for(row)
        if not self._is_tried and (ctx.epoch <= 1 or not self.alone(ctx)):  # workers begin anew in each pass
            with nullcontext() if self.alone(ctx) else _TRYING:
                if not self._is_tried:
                    self._try(values, ctx, seed)
                    self._is_tried = True
        return self._run(values, ctx, seed)

    def together(
        self, source: str, arrays: Sequence[Array], places: Strings, ctx: StreamContext, shape: tuple[int, ...]
    ) -> Array:
        """Return the arrays of a source as one array of a batch.

        Args:
            source: the source.
            arrays: the array of each example.
            places: where each example is found, for the message.
            ctx: the context of the pass.
            shape: the shape of an array before the transforms, for a batch without examples.

        Raises:
            StreamError: an array has another shape than the first one that was read.
        """
        first = self._shapes.setdefault(source, arrays[0].shape) if arrays else shape
        for array, place in zip(arrays, places, strict=True):
            if array.shape != first:
                what = f"the transforms made {source!r} of shape {array.shape}, but of the first example {first}"
                raise StreamError(f"{place}: {what}; end with a transform such as Resize or CenterCrop")
        out = ctx.empty((len(arrays), *first), arrays[0].dtype if arrays else np.float32)
        return np.stack(arrays, out=out) if arrays else out

    def _run(self, values: Named, ctx: StreamContext, seed: int, after: Callable[..., None] | None = None) -> Named:
        """Run the steps; `after` is called with the place of each step, and with its input and its output."""
        draws: AbstractContextManager[Any] = nullcontext()
        if self.alone(ctx):
            seed_generators(seed)
        else:
            draws = OwnDraws(torch.Generator().manual_seed(seed % 2**63))
        with draws:
            for place, step in self._steps:
                try:
                    found = step(values) if len(values) > 1 else step(*values.values())
                except EmrunError as error:
                    error.add_note(f"in {place}")
                    raise
                except Exception as error:
                    raise StreamError(f"{place} raised {type(error).__name__}: {error}") from error
                results = _checked(place, found, values)
                if after is not None:
                    after(place, values, results)
                values = results
        return values

    def _try(self, values: Named, ctx: StreamContext, seed: int) -> None:
        """Check that each step depends on its input and the seed alone, and leaves its input as it is.

        Raises:
            StreamError: a step does not.
        """
        names = [] if self.alone(ctx) else ["python", "numpy", "torch"]
        inputs = ""
        states: list[Any] = []
        digests: list[str] = []
        again: list[str] = []

        def look(place: str, before: Named, found: Named) -> None:
            nonlocal inputs
            now = [GENERATORS[name]() for name in names]
            changed = [name for name, old, new in zip(names, states, now, strict=True) if old != new]
            if changed:
                what = f"changes the global random numbers of {listed(changed)}, which all threads share"
                raise StreamError(f"{place} {what}; {ADVICE}", first_batch=True)
            if digest(before) != inputs:
                raise StreamError(f"{place} changes its input; let it change a copy", first_batch=True)
            inputs = digest(found)
            digests.append(inputs)
            if again and inputs != again[len(digests) - 1]:
                what = "gives another result for the same seed: it draws from a generator of its own, or keeps a state"
                raise StreamError(f"{place} {what}; draw by functions of torch, such as torch.rand", first_batch=True)

        for number in range(_TRIED[self.alone(ctx)]):
            for _ in range(2):
                states = [GENERATORS[name]() for name in names]
                inputs = digest(values)
                self._run({name: value.clone() for name, value in values.items()}, ctx, seed + number, look)
                again, digests = digests, []
            again = []


class OwnDraws(TorchFunctionMode):
    """Lets the functions of torch that this thread calls in the block draw from a generator, unless they are given one.

    Args:
        generator: the generator.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator
        self.has_drawn = False
        """Whether a function has drawn from the generator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Named | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in DRAWING:
            kwargs = kwargs or {}
            if kwargs.get("generator") is None:
                self.has_drawn = True
                kwargs = {**kwargs, "generator": self._generator}
        elif name in _REFUSED:
            message = f"torch's {name} draws random numbers, and takes no generator; {ADVICE}"
            raise StreamError(message, first_batch=True)
        return func(*args, **kwargs) if kwargs else func(*args)


def transforms_of(
    transform: TransformForm, augment: TransformForm, *, ignore: int | None = None
) -> tuple[Transforms, Transforms]:
    """Return the transforms of evaluations, and those of training passes.

    Args:
        transform: the argument `transform` of a dataset, for all streams.
        augment: the argument `augment`, for training passes.
        ignore: the class of the pixels of a mask that a transform makes up; None for a dataset without masks.

    Raises:
        ArgumentError: an entry is neither a callable nor the name of a transform, or its arguments are wrong.
        MissingExtra: torchvision is not installed.
    """
    always = _steps("transform", transform, ignore)
    return Transforms(always), Transforms([*always, *_steps("augment", augment, ignore)])


def picture_of(pixels: Array) -> Any:
    """Return bytes of shape (H, W, C) as a `tv_tensors.Image` of shape (C, H, W) with memory of its own."""
    from torchvision import tv_tensors

    return tv_tensors.Image(torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C")))


def mask_of(pixels: Array) -> Any:
    """Return the numbers of a mask of shape (H, W, 1) as a `tv_tensors.Mask` of shape (H, W)."""
    from torchvision import tv_tensors

    return tv_tensors.Mask(torch.from_numpy(pixels[..., 0].astype(np.int64)))


def array_of(image: torch.Tensor, dtype: str) -> Array:
    """Return what a transform has made of an image, as an array of shape (C, H, W).

    Args:
        image: the result of the last transform.
        dtype: `float32`, then bytes become values in [0, 1]; or `uint8`.

    Raises:
        StreamError: the image has another shape or dtype.
    """
    if image.ndim != 3 or not (image.dtype == torch.uint8 or image.is_floating_point()):
        shape = " x ".join(map(str, image.shape))
        what = f"the transforms returned an image of shape {shape} and dtype {str(image.dtype).removeprefix('torch.')}"
        raise StreamError(f"{what}, not uint8 or float of shape (C, H, W)")
    if dtype == "uint8" and image.is_floating_point():
        raise StreamError("the transforms returned floats, but the dataset has `dtype: uint8`; write `dtype: float32`")
    array: Array = image.detach().numpy()
    if dtype == "float32" and array.dtype == np.uint8:
        return np.divide(array, np.float32(255))
    return array.astype(dtype, copy=False)


def _steps(argument: str, entries: Any, ignore: int | None) -> list[Step]:
    if entries is None:
        return []
    if not isinstance(entries, list | tuple):
        raise ArgumentError(argument, f"{entries!r} is not a list, such as [ColorJitter: {{brightness: 0.3}}]")
    return [_step(f"{argument}[{index}]", entry, ignore) for index, entry in enumerate(entries)]


def _step(place: str, entry: Any, ignore: int | None) -> Step:
    """Return a callable of the config: one of torchvision's by its short name, or an object."""
    v2, tv_tensors = _torchvision()
    name, given = entry, None
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, given),) = entry.items()
    if not isinstance(name, str):
        if not callable(entry):
            what = f"{entry!r} is neither a callable nor a transform of torchvision"
            raise ArgumentError(place, f"{what}, such as {{ColorJitter: {{brightness: 0.3}}}}")
        fills = list(_fills(entry))
        if ignore is not None and not all(isinstance(fill, dict) and tv_tensors.Mask in fill for fill in fills):
            what = f"{type(entry).__name__} fills masks with class 0, not with the number of `ignore`, {ignore}"
            raise ArgumentError(place, f"{what}; write the transform by its short name")
        return f"{place} ({getattr(entry, '__name__', type(entry).__name__)})", entry
    target: Any = getattr(v2, name, None)
    if not isinstance(target, type) or not issubclass(target, v2.Transform):
        names = [each for each in dir(v2) if isinstance(getattr(v2, each), type)]
        what = f"torchvision.transforms.v2 has no transform {name!r}{did_you_mean(name, names)}"
        raise ArgumentError(place, f"{what}; write {{class: my_module.MyTransform}} for one of your own")
    if name in _OF_BATCHES:
        raise ArgumentError(place, f"{name} mixes the examples of a batch, and transforms get one; use the hook Mixup")
    arguments = dict(given) if isinstance(given, Mapping) else {}
    taken = inspect.signature(target).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        check_keys(f"{place}.{name}", arguments, list(taken))
    if isinstance(inner := arguments.get("transforms"), list | tuple):
        arguments["transforms"] = [
            _step(f"{place}.{name}.transforms[{index}]", each, ignore)[1] for index, each in enumerate(inner)
        ]
    if isinstance(arguments.get("dtype"), str):
        arguments["dtype"] = getattr(torch, arguments["dtype"], arguments["dtype"])
    if ignore is not None and "fill" in taken:
        arguments["fill"] = {tv_tensors.Mask: ignore, "others": arguments.get("fill", 0)}
    try:
        if isinstance(arguments.get("interpolation"), str):
            arguments["interpolation"] = v2.InterpolationMode(arguments["interpolation"])
        made = target(**arguments) if given is None or isinstance(given, Mapping) else target(given, **arguments)
    except Exception as error:
        raise ArgumentError(f"{place}.{name}", str(error)) from error
    return f"{place} ({name})", made


def _fills(step: Any) -> Iterator[Any]:
    """Yield what a transform of torchvision, and those that it consists of, fill made-up pixels with."""
    if hasattr(step, "fill"):
        yield step.fill
    inner = getattr(step, "transforms", None)
    if isinstance(inner, list | tuple | torch.nn.ModuleList):
        for each in inner:
            yield from _fills(each)


def _checked(place: str, found: Any, values: Named) -> Named:
    """Return what a step has returned by source, each of the type that it had.

    Raises:
        StreamError: it is something else.
    """
    from torchvision import tv_tensors

    results = found if len(values) > 1 else dict.fromkeys(values, found)
    if not isinstance(results, Mapping) or results.keys() != values.keys():
        what = type(found).__name__ if not isinstance(found, Mapping) else f"a mapping with {listed([*found])}"
        raise StreamError(f"{place} returned {what}, not a mapping with {listed([*values])}")
    kept = {}
    for name, before in values.items():
        value = results[name]
        if not isinstance(value, torch.Tensor):
            advice = "; write {import: ...} of a function that returns torch.from_numpy(...)"
            advice = advice if isinstance(value, np.ndarray) else ""
            raise StreamError(f"{place} returned {type(value).__name__} for {name!r}, not a tensor{advice}")
        kept[name] = value if isinstance(value, type(before)) else tv_tensors.wrap(value, like=before)
    return kept


def _torchvision() -> tuple[Any, Any]:
    """Return `torchvision.transforms.v2` and `torchvision.tv_tensors`."""
    with needing("`transform` or `augment`", "torchvision", "vision"):
        prepare_torchvision()
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    return v2, tv_tensors
