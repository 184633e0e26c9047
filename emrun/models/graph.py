"""A module whose layers do not follow each other one by one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from emrun.base.errors import ArgumentError, add_inputs
from emrun.base.wording import meant_of

_JOINS: dict[str, Any] = {
    "cat": torch.cat,
    "add": lambda values, dim: sum(values[1:], values[0]),
    "mul": lambda values, dim: torch.stack(values).prod(0),
    "last": lambda values, dim: values[0].select(dim, -1),
    "mean": lambda values, dim: values[0].mean(dim),
}


class _Join(nn.Module):
    def __init__(self, kind: str, dim: int) -> None:
        super().__init__()
        self.kind = kind
        self.dim = dim

    def forward(self, *values: Tensor) -> Any:
        return _JOINS[self.kind](values, self.dim)


class Graph(nn.Module):
    """A graph of layers, for what `torch.nn.Sequential` cannot say.

        model:
          module:
            class: Graph
            inputs: [numbers, city]
            steps:
              - [city, {class: Embedding, num_embeddings: 7, embedding_dim: 4}, place]
              - [[numbers, place], cat]
              - [null, {class: Linear, in_features: 6, out_features: 1}, head]

    Args:
        inputs: the names of the inputs: sources, unless the model says others.
        steps: `[from, what, name, {take: 0}]` each: an input, a step, null for the value before, or a list; a layer, or
            `cat`, `add`, `mul`, `last`, `mean`, along `{dim: 1}`; the name in `state_dict`; which value of a tuple.
        outputs: the steps whose values are returned; by default the last one.
    """

    def __init__(self, inputs: Sequence[str], steps: Sequence[Any], outputs: Sequence[str] | None = None) -> None:
        super().__init__()
        self.inputs = list(inputs)
        self.graph_steps: list[tuple[list[str], str, Any]] = []
        known = [*inputs]
        for index, step in enumerate(steps):
            given = [*step] if isinstance(step, list) else []
            options = given.pop() if len(given) > 2 and isinstance(given[-1], dict) else {}
            origin, what, name = [*given, str(index)][:3] if len(given) in (2, 3) else (None, None, "")
            layer = _Join(what, options.get("dim", 1)) if isinstance(what, str) and what in _JOINS else what
            if not isinstance(layer, nn.Module) or not options.keys() <= {"take", "dim"}:
                raise ArgumentError(f"steps[{index}]", "is not a step; write [from, layer or cat, name, {take: 0}]")
            origin = origin if isinstance(origin, list) else [origin]
            sources = [known[-1] if each is None else each for each in origin]
            for source in (each for each in sources if each not in known):
                raise ArgumentError(f"steps[{index}]", f"nothing before is {source!r}{meant_of(source, known)}")
            if name in known or not isinstance(name, str) or "." in name or hasattr(self, name):
                raise ArgumentError(f"steps[{index}]", f"{name!r} is taken, or is not a name; write another one")
            self.add_module(name, layer)
            self.graph_steps.append((sources, name, options.get("take")))
            known.append(name)
        self.outputs = list(outputs or known[-1:])
        for name in (each for each in self.outputs if each not in known):
            raise ArgumentError("outputs", f"no step is {name!r}{meant_of(name, known)}")

    def forward(self, *inputs: Any) -> Any:
        """Return the value of the last step, or those of `outputs`."""
        values = dict(zip(self.inputs, inputs, strict=True))
        for sources, name, take in self.graph_steps:
            try:
                found = self.get_submodule(name)(*[values[source] for source in sources])
            except Exception as error:
                add_inputs(
                    error, f"step {name!r}", [f"{each}: {getattr(values[each], 'shape', '?')}" for each in sources]
                )
                raise
            found = values[name] = found if take is None else found[take]
            if isinstance(found, tuple):
                raise ArgumentError("module", f"the step {name!r} returns a tuple; write {{take: 0}} at its end")
        return values[self.outputs[0]] if len(self.outputs) == 1 else tuple(values[name] for name in self.outputs)
