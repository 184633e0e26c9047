"""The scale of the loss in float16, without which small gradients would become zero."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from emrun.base.errors import ArgumentError
from emrun.base.types import State, Values
from emrun.ranks.parts import Weight

NOT_FINITE = "gradients in float16 are not finite, so the scale of the loss is reduced"


class LossScale:
    """Scales losses, unscales gradients and follows their range, with a `torch.amp.GradScaler`.

    Several optimizers have one scale, which changes at the end of a window, when no gradients are scaled.

    Args:
        device: the device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type)
        self._is_scaled = False  # whether there are gradients of scaled losses
        self._found: Tensor | None = None  # the last check of torch's scaler
        self.unit: Tensor | None = None
        """The weights of a window are divided by this power of two, the largest one in that of its first part."""
        self._overflows = False  # whether any check in this window has found a gradient that is not finite

    def weighted(self, loss: Tensor, weight: Weight) -> Tensor:
        """Return the loss of a part of a window, multiplied by its weight and divided by `unit`.

        Otherwise a weight such as a number of tokens would use up the range of float16.
        """
        if self.unit is None:
            self.unit = torch.as_tensor(weight, dtype=torch.float32).clamp_min(1.0).log2().floor().exp2()
        return loss * (weight / self.unit.to(loss.device))

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss, multiplied by the scale."""
        self._is_scaled = True
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> bool:
        """Divide the gradients of an optimizer by the scale; waits for the device.

        Returns:
            Whether all gradients are finite.

        Raises:
            ArgumentError: the gradients were not scaled.
        """
        if not self._is_scaled:
            raise ArgumentError(
                "precision",
                "fp16 scales the loss: train_step must call self.backward(loss) before self.update(optimizer)",
            )
        states = self._states
        states.pop(id(optimizer), None)  # if it makes several updates in a window
        self._scaler.unscale_(optimizer)
        found = list(states[id(optimizer)]["found_inf_per_device"].values())
        if not found:  # no gradients
            return True
        self._found = found[-1]
        overflows = any(each.item() for each in found)
        self._overflows |= overflows
        return not overflows

    def end(self) -> None:
        """End a window: change the scale."""
        if self._found is not None:
            if self._overflows:
                self._found.fill_(1.0)  # the scaler knows only the last check of each optimizer
            self._scaler.update()
        self.clear()

    def clear(self) -> None:
        """Forget a window that has begun."""
        self._is_scaled = False
        self._found = None
        self._overflows = False
        self.unit = None
        self._states.clear()

    @property
    def _states(self) -> dict[int, State]:
        """What torch's scaler knows of each optimizer in this window, by its id."""
        return self._scaler._per_optimizer_states

    @property
    def value(self) -> float:
        """The scale; waits for the device."""
        return self._scaler.get_scale()

    def state_dict(self) -> State:
        """Return the scale, and the number of updates since it was changed."""
        state = self._scaler.state_dict()
        return {"scale": float(state["scale"]), "growth_tracker": int(state["_growth_tracker"])}

    def load_state_dict(self, state: Values) -> None:
        """Restore what `state_dict` returned."""
        self._scaler.load_state_dict(
            {**self._scaler.state_dict(), "scale": state["scale"], "_growth_tracker": state["growth_tracker"]}
        )
