"""Packs: a module that sees another chat is found; tests/datasets/test_chats.py has models of transformers."""

import pytest
import torch

from emrun.base.errors import ArgumentError
from emrun.models.step.packs import check_packs

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 2]])
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


class Sums(torch.nn.Module):
    """Adds up embeddings, since the chat has begun or, if `far`, since the pack has."""

    def __init__(self, dtype=torch.float32, far=False, drop=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(10, 4, dtype=dtype)
        self.drop = torch.nn.Dropout(drop)
        self.far = far
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        values = self.drop(self.table(inputs["input_ids"]))
        groups = (inputs["position_ids"] == 0).cumsum(1)
        sees = (groups[:, :, None] == groups[:, None]) | self.far
        return {"logits": sees.tril().to(values.dtype) @ values, "scale": values.mean()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, 2])
def test_chats_that_see_each_other_are_an_error(dtype, rows):
    inputs = {"input_ids": TOKENS[:rows], "position_ids": POSITIONS[:rows]}
    module = Sums(dtype, drop=0.5)
    before = torch.get_rng_state()
    check_packs(module, module, inputs, 32)
    assert module.calls == 3 and module.training and torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ArgumentError, match="module: the chats of a pack see each other: 'logits' of a chat differs"):
        check_packs(Sums(dtype, far=True), Sums(dtype, far=True), inputs, 32)


def test_a_batch_of_one_chat_is_checked_with_itself():
    inputs = {"input_ids": TOKENS[:1, :3], "position_ids": POSITIONS[:1, :3]}
    check_packs(Sums(), Sums(), inputs, 32)
    with pytest.raises(ArgumentError, match="see each other"):
        check_packs(Sums(far=True), Sums(far=True), inputs, 32)


def test_positions_that_forward_does_not_get_are_an_error():
    with pytest.raises(ArgumentError, match="inputs: `pack` needs a module that gets the source"):
        check_packs(Sums(), Sums(), {"input_ids": TOKENS}, 32)
