"""Gradients are cleared before a step, and whether the step made an update is noticed."""

import torch

from emrun.models.updates import Traces, clear_gradients


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


def test_the_step_of_an_optimizer_is_an_update_also_when_no_version_of_a_parameter_counts_it():
    class ThroughData(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(1.0)

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    optimizer = ThroughData(parameters, lr=1.0)
    traces = Traces(parameters, None)
    version = parameters[0]._version
    assert not traces.has_updated()
    optimizer.step()
    assert parameters[0]._version == version
    assert traces.has_updated()
