"""Gradients are cleared before a step."""

import torch

from emrun.models.updates import clear_gradients


def test_gradients_are_cleared_and_an_optimizer_that_overrides_zero_grad_clears_its_own():
    class Keeps(torch.optim.SGD):
        cleared = 0

        def zero_grad(self, set_to_none=True):
            self.cleared += 1

    module = torch.nn.Linear(2, 1)
    plain, keeps = torch.optim.SGD(module.parameters(), lr=1.0), Keeps(module.parameters(), lr=1.0)
    patched = torch.optim.SGD(module.parameters(), lr=1.0)
    patched.zero_grad = lambda: None
    module(torch.ones(1, 2)).sum().backward()
    clear_gradients(keeps)
    clear_gradients(patched)
    assert keeps.cleared == 1
    assert all(parameter.grad is not None for parameter in module.parameters())
    clear_gradients(plain)
    assert all(parameter.grad is None for parameter in module.parameters())
