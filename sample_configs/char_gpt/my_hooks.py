import logging

import torch

from emrun import AbstractHook


class LogText(AbstractHook):
    """Logs `prompt` and the text with which the model continues it, each time that `valid` was evaluated."""

    every_rank = True  # a model whose weights are sharded is run by all ranks together

    def __init__(self, prompt="def ", length=300, temperature=0.8):
        super().__init__()
        self.prompt, self.length, self.temperature = prompt, length, temperature

    @torch.no_grad()
    def after_stream(self, stream_name):  # the module still has the weights for evaluations
        if stream_name == "valid":
            model, text = self.main_loop.model, list(self.prompt.encode())
            generator = torch.Generator().manual_seed(0)  # its own, so that the run does not depend on this hook
            for _ in range(self.length):
                tokens = torch.tensor([text[-model.module.window :]], device=model.device)
                logits = model.module(tokens)["logits"][0, :, -1].cpu()
                text.append(torch.multinomial((logits / self.temperature).softmax(0), 1, generator=generator).item())
            written = bytes(text).decode(errors="replace")
            shown = "".join(each if each.isprintable() or each == "\n" else "?" for each in written)
            logging.getLogger(__name__).info("%s", shown)
