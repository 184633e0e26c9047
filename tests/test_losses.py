"""Losses: the mean over the trained tokens of each example, which are its weight."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from emrun import Factory, TorchModel
from emrun.base.errors import ArgumentError
from emrun.losses import next_token, trained_tokens

LABELS = torch.tensor([[3, 1, -100, 2], [1, -100, -100, -100], [-100, 0, 4, 1]])
LOGITS = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))


class Told(torch.nn.Module):
    def __init__(self, **more):
        super().__init__()
        self.logits = torch.nn.Parameter(LOGITS.clone())
        self.more = more

    def forward(self, labels):
        return {"logits": self.logits, **self.more}


def loss(*inputs, **options):
    return Factory(next_token, is_import=True, options={"inputs": inputs, **options})


def run(batch, module=None, **arguments):
    arguments = {"loss": loss("logits", "labels"), **arguments}
    model = TorchModel(module or Told(), inputs=["labels"], optimizer=Factory(torch.optim.SGD, lr=1.0), **arguments)
    return model, model.run(batch, train=True, stream="train")


def test_a_token_is_told_by_the_logits_before_it():
    first = cross_entropy(LOGITS[0, [0, 2]], LABELS[0, [1, 3]])
    last = cross_entropy(LOGITS[2, :3], LABELS[2, 1:])
    assert torch.allclose(next_token(LOGITS, LABELS), torch.stack([first, torch.zeros(()), last]))
    assert trained_tokens(LABELS).tolist() == [2, 0, 3]
    assert next_token(LOGITS.bfloat16(), LABELS).dtype == torch.float32
    with pytest.raises(ValueError, match=r"logits of shape \(3, 4, 5\) do not fit labels of shape \(3, 5\)"):
        next_token(LOGITS, torch.zeros(3, 5, dtype=torch.int64))


def test_the_minimised_loss_is_the_mean_over_tokens_also_with_other_losses():
    whole = cross_entropy(LOGITS[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten())
    model, outputs = run({"labels": LABELS.numpy()})
    assert float(model.step_values()["loss"]) == pytest.approx(float(whole), rel=1e-6)
    assert outputs["example_weight"].tolist() == [2, 0, 3]
    both = {"a": loss("logits", "labels"), "b": loss("logits", "labels", scale=0.5)}
    model, _ = run({"labels": LABELS.numpy()}, loss=both)
    assert float(model.step_values()["loss"]) == pytest.approx(1.5 * float(whole), rel=1e-6)


def test_weights_of_forward_stay_and_losses_with_other_labels_are_an_error():
    _, outputs = run({"labels": LABELS.numpy()}, Told(example_weight=torch.ones(3)))
    assert outputs["example_weight"].tolist() == [1, 1, 1]
    with pytest.raises(ArgumentError, match=r"b: the examples have one weight, which loss.a takes from 'labels', and"):
        run({}, loss={"a": loss("logits", "labels"), "b": loss("logits", "others")})
