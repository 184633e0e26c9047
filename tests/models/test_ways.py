"""A model runs without what changes how a step is calculated, and then with it again."""

import pytest
import torch

from emrun.models.recomputation import recomputed
from emrun.models.torch_model import TorchModel


@pytest.fixture
def model():
    """Return a model with all ways."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Flatten(0))
    return TorchModel(
        module, ["x"], ["loss"], compile={"backend": "eager"}, precision="bf16", micro_batch_size=2, recompute="0"
    )


def test_each_way_is_off_in_the_block_and_on_again_after_an_error(model):
    keys, part = ["compile", "precision", "micro_batch_size", "recompute"], model.module[0]
    assert model.ways.used == keys
    compiled = model.module._compiled_call_impl
    with pytest.raises(RuntimeError, match="in the block"), model.ways.without(keys):
        assert model.module._compiled_call_impl is None
        assert model._micro_batches.size is None
        assert recomputed(model.module) == []
        with model._forward_pass.autocast.on():
            assert part(torch.ones(1, 2)).dtype is torch.float32
        raise RuntimeError("in the block")
    assert model.module._compiled_call_impl is compiled
    assert model._micro_batches.size == 2
    assert recomputed(model.module) == [part]
    with model._forward_pass.autocast.on():
        assert part(torch.ones(1, 2)).dtype is torch.bfloat16


def test_a_way_that_is_not_named_stays_on(model):
    with model.ways.without(["compile"]):
        assert recomputed(model.module)
        with model._forward_pass.autocast.on():
            assert model.module[0](torch.ones(1, 2)).dtype is torch.bfloat16


def test_in_float64_weights_buffers_and_sources_are_float64_and_have_their_values_again(model):
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    with model.ways.without(model.ways.used), model.ways.in_float64():
        outputs = model.run({"x": torch.ones(4, 2)}, False, "valid")
        assert outputs["loss"].dtype is torch.float64
    for name, value in model.module.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])
    with model.ways.in_float64(torch.bfloat16):
        assert torch.equal(model.module[0].weight, before["0.weight"].bfloat16().double())
        assert not torch.equal(model.module[0].weight, before["0.weight"].double())
    assert torch.equal(model.module[0].weight, before["0.weight"])
    assert model._forward_pass.tensors({"x": torch.ones(4, 2)})["x"].dtype is torch.float32
