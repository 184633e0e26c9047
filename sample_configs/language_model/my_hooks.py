import math

from emrun import AbstractHook


class Perplexity(AbstractHook):
    """Writes the exponential of the mean loss of each stream."""

    writes = ("perplexity/mean",)

    def after_epoch(self, epoch_data):
        for variables in epoch_data.values():
            variables["perplexity"] = {"mean": math.exp(variables["loss"]["mean"])}
