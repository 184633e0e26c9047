import numpy as np
import torch

from emrun import AbstractHook, TrainingTerminated


class GradientNorm(AbstractHook):
    """Records the largest norm of the gradients of an epoch; ends the training when it is at most `enough`."""

    writes = ["gradient_norm"]

    def __init__(self, enough=0.0):
        super().__init__()
        self.enough = enough
        self.largest = 0.0

    def before_epoch(self):
        self.largest = 0.0

    def before_update(self, model):
        gradients = [parameter.grad for parameter in model.module.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self.largest = float(np.maximum(self.largest, norm.item()))  # NaN stays NaN, unlike with max()

    def after_epoch(self, epoch_id, epoch_data):
        if epoch_id > 0:
            epoch_data["train"]["gradient_norm"] = self.largest
            if self.largest <= self.enough:
                raise TrainingTerminated(f"gradients are as small as {self.largest:g}")

    def state_dict(self):
        return {"largest": self.largest}

    def load_state_dict(self, state):
        self.largest = state["largest"]
