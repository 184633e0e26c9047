import torch

import emrun


class Sam(emrun.TorchModel):
    """Trains with the gradients at w + rho * g / |g|, where g are the gradients at the weights w."""

    def __init__(self, module, *args, rho=0.05, **kwargs):
        super().__init__(module, *args, **kwargs)
        self.rho = rho

    def train_step(self, inputs):
        trained = [each for each in self.module.parameters() if each.requires_grad]
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            outputs = self.forward(inputs)  # the second forward draws the same numbers: dropout drops the same
        gradients = torch.autograd.grad(outputs["loss"].mean(), trained, allow_unused=True)
        norm = torch.nn.utils.get_total_norm([each for each in gradients if each is not None])
        kept = [each.data for each in trained]
        buffers = [each.clone() for each in self.module.buffers()]
        try:
            for parameter, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    parameter.data = parameter.data + self.rho / (norm + 1e-12) * gradient
            torch.clear_autocast_cache()  # with bf16 or fp16, it has the weights as they were
            self.backward(self.forward(inputs)["loss"].mean())
        finally:  # the weights are the same to the last bit again, and BatchNorm has seen the batch once
            for parameter, weights in zip(trained, kept, strict=True):
                parameter.data = weights
            for buffer, values in zip(self.module.buffers(), buffers, strict=True):
                buffer.copy_(values)
        for name in self.optimizers:
            self.update(name)
        return outputs
