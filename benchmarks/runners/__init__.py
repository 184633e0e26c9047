"""The same work in emrun and in its peers: one file for each, which imports only the framework that it measures.

A runner notes how its work differs (`NOTES`, by table) and trains:

    bare(work)              the model of `work` on its batches, with all optional features switched off
    begun(work, place)      as `bare` in a whole run; the clock runs from its first batch
    typical(work, place)    with a progress bar, mean loss and accuracy, a CSV file and a checkpoint per epoch
    null(work)              a model that does nothing, if the framework allows one
    several(work)           as `bare`, in one of two processes that train together, if the framework allows that
"""

RAW = "raw"
RUNNERS = {  # module: title, distribution
    "emrun": ("emrun", "emrun"),
    "ignite": ("Ignite Engine", "pytorch-ignite"),
    "skorch": ("skorch", "skorch"),
    "accelerate": ("Accelerate loop", "accelerate"),
    "mmengine": ("MMEngine Runner", "mmengine"),
    "transformers": ("Hugging Face Trainer", "transformers"),
    "lightning": ("Lightning Trainer", "lightning"),
    "keras": ("Keras 3 fit, torch backend", "keras"),
}
WITH_BEGUN = ("emrun",)
WITH_NULL = ("emrun", "ignite", "skorch", "mmengine", "lightning")
WITH_SEVERAL = ("emrun", "accelerate", "lightning")
WAYS = {  # function of accumulation.py: title, distribution
    "emrun": ("emrun, the accumulator of ComputeStats", "emrun"),
    "torchmetrics": ("torchmetrics.MeanMetric", "torchmetrics"),
    "appended": ("list of tensors, torch.cat", "torch"),
    "summed": ("a running sum", "torch"),
}
