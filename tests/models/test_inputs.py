"""The inputs of a module: the sources that forward, losses and metrics get, and the tensors that they become."""

from array import array
from collections import UserDict

import numpy as np
import pytest
import torch
from doubles import SGD, XY, Affine, Keep, Two, evaluate, identity, run
from torch import nn

from emrun import Factory, TorchModel
from emrun.base.encoding import digest
from emrun.base.errors import ArgumentError, StreamError
from emrun.dataset import SourceInfo
from emrun.diagnosis.values import array_of


class Optional(Keep):
    def forward(self, a, mask=None):
        return self.keep(a, mask)


class Anything(Keep):
    def forward(self, *arguments):
        return self.keep(*arguments)


class Named(Keep):
    def forward(self, a, **others):
        return self.keep(a, *others.values())


AB = [{"a": [1.0], "b": [2.0]}]
ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])


@pytest.mark.parametrize(
    ("inputs", "batch", "expected"),
    [
        (None, {"a": [1.0], "b": [2.0]}, (ONE, TWO)),
        (["b", "a"], {"a": [1.0], "b": [2.0]}, (ONE, TWO)),  # by name, whatever the order
        (["b", "other"], {"b": [1.0], "other": [2.0]}, (ONE, TWO)),  # by position, as one is no parameter
        ({"a": "y", "b": "x"}, {"x": [2.0], "y": [1.0]}, (ONE, TWO)),
        ({"a": "x", "b": "x"}, {"x": [1.0]}, (ONE, ONE)),
        (["x", "x"], {"x": [1.0]}, (ONE, ONE)),
        (["a", "a"], {"a": [1.0]}, (ONE, ONE)),
    ],
)
def test_forward_gets_the_sources_that_inputs_names(inputs, batch, expected):
    module = Two()
    evaluate(TorchModel(module, inputs=inputs), [batch])
    assert module.called == expected


def test_sources_are_the_inputs_of_the_model_once_each():
    assert list(TorchModel(Two(), inputs={"a": "x", "b": "x"}).input_names) == ["x"]


@pytest.mark.parametrize(("batch", "mask"), [({"a": [1.0], "mask": [2.0]}, TWO), ({"a": [1.0]}, None)])
def test_a_parameter_with_a_default_is_passed_when_a_batch_has_it(batch, mask):
    module = Optional()
    model = TorchModel(module)
    evaluate(model, [batch])
    assert module.called == (ONE, mask)
    assert (list(model.input_names), list(model.optional_input_names)) == (["a"], ["mask"])


def test_a_parameter_with_a_default_is_not_passed_when_inputs_leaves_it_out():
    module = Optional()
    evaluate(TorchModel(module, inputs=["a"]), [{"a": [1.0], "mask": [2.0]}])
    assert module.called == (ONE, None)


def test_a_module_that_takes_any_arguments_gets_its_inputs_by_position():
    module = Anything()
    evaluate(TorchModel(module, inputs=["b", "a"]), AB)
    assert module.called == (TWO, ONE)


def test_a_module_that_takes_any_keywords_gets_a_mapping_by_name():
    module = Named()
    evaluate(TorchModel(module, inputs={"a": "a", "c": "b"}), AB)
    assert module.called == (ONE, TWO)


def test_a_module_that_takes_any_keywords_gets_a_list_by_name_if_that_fits():
    module = Named()
    evaluate(TorchModel(module, inputs=["b", "a"]), AB)
    assert module.called == (ONE, TWO)
    evaluate(TorchModel(module, inputs=["b"]), AB)  # no `a`: by position
    assert module.called == (TWO,)


class Labelled(Keep):
    def forward(self, a, mask=None, label=None, **others):
        return self.keep(a, mask, label, others)


@pytest.mark.parametrize("inputs", [["a", "mask", "label", "b"], {"a": "a", "mask": "m", "label": "y", "b": "b"}])
def test_a_prediction_needs_no_source_whose_parameter_has_a_default_but_all_others(inputs, caplog):
    module = Labelled()
    model = TorchModel(module, inputs=inputs)
    model.predict_only()
    sources = dict(zip(inputs, inputs, strict=True)) if isinstance(inputs, list) else inputs
    batch = {"a": [1.0], sources["mask"]: [2.0], "b": [3.0]}
    with caplog.at_level("INFO"):
        evaluate(model, [batch, batch])
    a, mask, label, others = module.called
    assert (a, mask, label, others) == (ONE, TWO, None, {"b": torch.tensor([3.0])})
    assert caplog.messages == [f"the batch has no {sources['label']!r}: forward of Labelled is called without it"]
    with pytest.raises(StreamError, match="needs b"):
        evaluate(model, [{"a": [1.0]}])


@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (Anything(), None, "inputs: Anything.forward takes any arguments; list the sources that it gets"),
        (Two(), {"aa": "x"}, "no parameter 'aa'; did you mean 'a'? (it has a, b)"),
        (Two(), ["x", "y", "z"], "Two.forward: too many positional arguments"),
        (Two(), ["a"], "Two.forward: missing a required argument: 'b'"),
        (Two(), ["x"], "Two.forward: missing a required argument: 'b'"),
        (Two(), {"a": "x"}, "Two.forward: missing a required argument: 'b'"),
        (Two(), "a", "'a' is not a list of names"),
        (Two(), [1, 2], "is not a list of names"),
        (Two(), {"a": 1, "b": 2}, "inputs: a: 1 is not a source"),
    ],
)
def test_inputs_that_do_not_fit_forward_are_refused_at_once(module, inputs, message):
    with pytest.raises(ArgumentError, match=r"^inputs: ") as caught:
        TorchModel(module, inputs=inputs)
    assert message in str(caught.value)


def test_sources_of_loss_and_metrics_are_inputs():
    loss = Factory(nn.MSELoss, options={"inputs": ["same", "target"]})
    metrics = {"error": Factory(lambda: torch.sub, options={"inputs": ["same", "other"]})}
    model = identity(loss=loss, metrics=metrics)
    assert list(model.input_names) == ["x", "target", "other"]
    (data,) = evaluate(model, [{"x": [3.0], "target": [1.0], "other": [5.0]}])
    assert (data["loss"].item(), data["error"].item()) == (4.0, -2.0)


def test_a_missing_source_of_the_loss_is_reported_before_the_module_runs():
    loss = Factory(nn.MSELoss, options={"inputs": ["same", "label"]})
    with pytest.raises(
        StreamError, match=r"model.loss needs label, which the batch does not have; did you mean 'labels'"
    ):
        evaluate(identity(loss=loss), [{"x": [3.0], "labels": [1.0]}])
    with pytest.raises(StreamError, match=r"for a stream without labels there is `emrun predict`"):
        evaluate(identity(loss=loss), [{"x": [3.0]}])
    loss.options["inputs"] = ["sane", "labels"]
    with pytest.raises(StreamError, match=r"needs sane, which the batch does not have; did you mean 'same'\?"):
        evaluate(identity(loss=loss), [{"x": [3.0], "labels": [1.0]}])


def test_a_source_that_only_the_loss_needs_does_not_reach_forward():
    class Strict(Keep):
        def forward(self, a):
            return {**self.keep(a), "extra": a * self.weight}

    module = Strict()
    model = TorchModel(module, loss=Factory(nn.L1Loss, options={"inputs": ["extra", "b"]}), optimizer=SGD)
    (data,) = run(model, AB)
    assert module.called == (ONE,)
    assert data["loss"].item() == 2.0


@pytest.mark.parametrize("module_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "values",
    [
        np.array([1.5, -2.0]),
        np.array([1.5, -2.0], dtype=np.float16),
        np.array([1.5, -2.0], dtype=np.float32),
        [1.5, -2.0],
        (1.5, -2.0),
        torch.tensor([1.5, -2.0]),
        torch.tensor([1.5, -2.0], dtype=torch.float64),
        [np.array(1.5), np.array(-2.0)],
        [np.float32(1.5), np.float64(-2.0)],
        [torch.tensor(1.5), torch.tensor(-2.0)],
    ],
)
def test_floating_point_sources_get_the_dtype_of_the_module(values, module_dtype):
    module = Keep()
    module.forward = lambda a: module.keep(a)
    evaluate(TorchModel(module.to(module_dtype)), [{"a": values}])
    assert module.called[0].dtype is module_dtype
    assert module.called[0].tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    "values",
    [np.array([3, 250], dtype=dtype) for dtype in (np.uint8, np.int16, np.int32, np.int64, np.uint16)]
    + [[3, 250], (3, 250), [np.int32(3), np.int32(250)], torch.tensor([3, 250], dtype=torch.int32), range(3, 251, 247)],
)
def test_integer_sources_become_int64(values):
    (data,) = evaluate(identity(), [{"x": values}])
    assert data["same"].dtype is torch.int64
    assert data["same"].tolist() == [3, 250]


@pytest.mark.parametrize("values", [np.array([True, False]), [True, False], [np.True_, np.False_]])
@pytest.mark.filterwarnings("ignore:In future, it will be an error for 'np.bool_'")  # torch 2.6 and NumPy 1
def test_booleans_stay_booleans(values):
    (data,) = evaluate(identity(), [{"x": values}])
    assert data["same"].dtype is torch.bool
    assert data["same"].tolist() == [True, False]


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "values",
    [
        read_only(np.array([[1.0, 2.0], [3.0, 4.0]])),
        np.array([[3.0, 4.0], [1.0, 2.0]])[::-1],
        np.array([((1.0, 2.0), 0), ((3.0, 4.0), 0)], [("values", float, 2), ("packed", bool)])["values"],
        np.array([[2.0, 1.0], [4.0, 3.0]])[:, ::-1],
        np.array([[1.0, 3.0], [2.0, 4.0]]).T,
        np.array([[1.0, 0.0, 2.0], [3.0, 0.0, 4.0]])[:, ::2],
        [np.array([1.0, 2.0]), np.array([3.0, 4.0])],
        [read_only(np.array([1.0, 2.0])), np.array([4.0, 3.0])[::-1]],
        [[np.array(1.0), np.array(2.0)], [np.array(3.0), np.array(4.0)]],
        (torch.tensor([1.0, 2.0]), np.array([3.0, 4.0])),
        [[1.0, 2.0], [3.0, 4.0]],
        [[1, 2.0], (3, 4)],
    ],
    ids=["read-only", "reversed", "of packed rows", "mirrored", "transposed", "strided", "arrays", "odd arrays",
         "nested arrays", "mixed", "lists", "mixed numbers"],
)  # fmt: skip
@pytest.mark.parametrize("module_dtype", [torch.float32, torch.float64])
def test_sources_of_any_layout_become_the_same_tensor(values, module_dtype):
    module = Keep()
    module.forward = lambda x: module.keep(x)
    evaluate(TorchModel(module.to(module_dtype)), [{"x": values}])
    assert module.called[0].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert module.called[0].is_contiguous()


WIDER = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["array", "tensor"])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("cut", [np.s_[:, 1], np.s_[:, ::2], np.s_[::2]], ids=str)
def test_a_slice_is_contiguous_for_forward_losses_and_metrics(make, dtype, cut):
    """As `view` needs, with which torchmetrics flattens a target."""
    module = Keep()
    module.forward = lambda x: module.keep(x)
    metric = Factory(lambda x: x.view(-1).float().sum(), options={"inputs": ["x"]}, is_import=True)
    values = make(WIDER.astype(dtype))[cut]
    model = TorchModel(module, inputs={"x": "x"}, metrics={"flat": metric})
    (outputs,) = evaluate(model, [{"x": values}])
    assert module.called[0].is_contiguous()
    assert module.called[0].tolist() == torch.as_tensor(np.asarray(values)).to(module.called[0].dtype).tolist()
    assert outputs["flat"] == np.asarray(values).astype(float).sum()


def test_a_read_only_array_is_not_written_to():
    class Add(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x.add_(1)

    array = read_only(np.zeros(2, dtype=np.float32))
    evaluate(TorchModel(Add(), outputs=["y"]), [{"x": array}])
    assert array.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "values",
    [
        [[1.0, 2.0], [3.0]],
        [np.array([1.0, 2.0]), np.array([3.0])],
        ["one", "two"],
        np.array(["one", "two"]),
        [None, None],
        [{}, {}],
        np.array([1, "a"], dtype=object),
    ],
    ids=["ragged lists", "ragged arrays", "strings", "array of strings", "nothing", "mappings", "objects"],
)
def test_a_source_that_cannot_become_a_tensor_is_named(values):
    with pytest.raises(StreamError, match=r"source 'x' cannot become a tensor: .*numbers of equal shape"):
        evaluate(identity(), [{"x": values}])


def test_a_source_that_is_not_an_input_is_unchanged():
    names = ["a", "b"]
    (data,) = evaluate(identity(), [{"x": [1.0, 2.0], "name": names}])
    assert data["name"] is names


def test_a_module_without_parameters_gets_the_default_dtype():
    (data,) = evaluate(TorchModel(nn.ReLU(), inputs=["x"], outputs=["y"]), [{"x": [1.0, -1.0]}])
    assert data["y"].dtype is torch.float32


def test_an_integer_parameter_before_the_others_does_not_decide_the_dtype():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.tensor([1]), requires_grad=False)
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x):
            return {"y": x * self.scale}

    (data,) = evaluate(TorchModel(Quantised()), [{"x": np.array([1.5], dtype=np.float32)}])
    assert data["y"].dtype is torch.float64
    assert data["y"].item() == 3.0


class Mixed(nn.Module):
    """Parts of several dtypes, in the order in which they are given; notes the dtype of its input."""

    def __init__(self, **parts):
        super().__init__()
        for name, (part, dtype) in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part.to(dtype))
            else:
                setattr(self, name, nn.Parameter(torch.ones(part, dtype=dtype)))

    def forward(self, x):
        self.found = x.dtype
        return {"y": x}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"scale": (1, torch.float64), "body": (nn.Linear(3, 3), torch.float32)}, torch.float32),
        ({"scale": (1, torch.float16), "body": (nn.Linear(3, 3), torch.float32)}, torch.float32),
        ({"table": (nn.Embedding(99, 3), torch.float16), "body": (nn.Linear(3, 3), torch.float32)}, torch.float32),
        ({"table": (nn.EmbeddingBag(99, 3), torch.float16), "body": (nn.Linear(3, 3), torch.float32)}, torch.float32),
        ({"table": (nn.Embedding(9, 3), torch.bfloat16), "body": (nn.Linear(3, 3), torch.bfloat16)}, torch.bfloat16),
        ({"table": (nn.Embedding(9, 3), torch.float64)}, torch.float64),
        ({"lora": (2, torch.float32), "more": (2, torch.float32), "body": (nn.Linear(9, 9), torch.bfloat16)},
         torch.bfloat16),
        ({"packed": (99, torch.float8_e4m3fn), "scale": (1, torch.bfloat16)}, torch.bfloat16),
        ({"norm": (nn.BatchNorm1d(3, affine=False), torch.float64)}, torch.float64),
    ],
    ids=["scale", "half scale", "table", "bag", "all bfloat16", "only a table", "lora", "8 bits", "only buffers"],
)  # fmt: skip
def test_most_numbers_of_the_parameters_decide_the_dtype(parts, expected):
    module = Mixed(**parts)
    evaluate(TorchModel(module, device="cpu"), [{"x": np.ones((2, 3), np.float32)}])
    assert module.found is expected


@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
@pytest.mark.filterwarnings("ignore")
def test_a_sparse_source_reaches_forward_and_has_a_checksum(kind):
    make = getattr(torch.eye(3), kind)
    info = SourceInfo()
    info.add(make())
    assert info.row()[1:] == ["(3,)", "0 to 1"]
    assert digest(make()) == digest(make())
    assert digest(make()) != digest(getattr(2 * torch.eye(3), kind)())
    assert digest(make()) != digest(getattr(torch.eye(3).flip(0), kind)())
    assert array_of(make()).tolist() == np.eye(3).tolist()
    assert tensor_of(make()).layout is make().layout


def test_a_tensor_without_values_is_refused_with_its_source():
    with pytest.raises(StreamError, match="source 'x' cannot become a tensor: it is on the device meta"):
        tensor_of(torch.ones(2, device="meta"))
    assert digest(torch.ones(2, device="meta")) != digest(torch.ones(3, device="meta"))  # one that nobody reads


class Pixels(nn.Module):
    """Normalises on the device what it gets; notes the dtypes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.dtypes = []

    def forward(self, image, mask):
        self.dtypes.append((image.dtype, mask.dtype))
        return {"loss": (image.float() / 255 * self.scale - mask.float()) ** 2}


@pytest.mark.parametrize(
    ("inputs", "dtypes"),
    [
        (["image", "mask"], (torch.int64, torch.int64)),
        ({"image": "image", "mask": {}}, (torch.int64, torch.int64)),
        ({"image": {"dtype": "keep"}, "mask": "mask"}, (torch.uint8, torch.int64)),
        ({"image": {"source": "image", "dtype": "uint8"}, "mask": {"dtype": "keep"}}, (torch.uint8, torch.int8)),
        ({"image": {"dtype": "float16"}, "mask": {"dtype": torch.bool}}, (torch.float16, torch.bool)),
        ({"image": {"source": "mask", "dtype": "int8"}, "mask": {"dtype": "int8"}}, (torch.int8, torch.int8)),
    ],
)
@pytest.mark.parametrize("make", [lambda each: each, torch.from_numpy], ids=["array", "tensor"])
def test_a_source_has_the_dtype_that_inputs_says(inputs, dtypes, make):
    module = Pixels()
    model = TorchModel(module, inputs=inputs, optimizer=SGD, device="cpu")
    batch = {"image": make(np.array([0, 255], np.uint8)), "mask": make(np.array([1, 0], np.int8))}
    model.run(batch, True, "train")
    model.run(batch, False, "valid")
    assert module.dtypes == [dtypes] * 2


def test_a_dtype_of_its_own_reaches_the_module_from_a_config(tmp_path, monkeypatch, emrun_here):
    (tmp_path / "pixels.py").write_text(
        "import numpy as np, torch\n\n\n"
        "class Data:\n"
        "    def train_stream(self):\n"
        "        yield {'picture': np.array([[0, 255]] * 4, np.uint8)}\n\n\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, image):\n"
        "        assert image.dtype is torch.uint8, image.dtype\n"
        "        return {'loss': super().forward(image.float() / 255).mean(dim=1)}\n"
    )
    (tmp_path / "c.yaml").write_text(
        "dataset: {class: pixels.Data}\n"
        "model:\n"
        "  module: {class: pixels.Net, in_features: 2, out_features: 1}\n"
        "  inputs: {image: {source: picture, dtype: keep}}\n"
        "  optimizer: {class: SGD, lr: 0.1}\n"
        "main_loop: {buffer: 2}\n"
        "hooks: [StopAfter: {epochs: 1}]\n"
    )
    done = emrun_here("train", "-q", "c.yaml")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"dtyp": "keep"},
            "inputs.image.dtyp: unknown key 'dtyp'; did you mean 'dtype'?; allowed: source, dtype, scale,",
        ),
        ({"dtype": "uint9"}, "image: dtype 'uint9' is neither keep nor a dtype of torch, such as uint8; did you mean"),
        ({"dtype": "nn"}, "image: dtype <module 'torch.nn'"),
        ({"source": 3}, "image: source 3 is not a name"),
        (["image"], "image: ['image'] is not a source"),
        ({"source": "mask", "dtype": "uint8"}, "source 'mask' cannot have two dtypes"),
    ],
)
def test_a_wrong_source_of_inputs_is_refused(entry, message):
    with pytest.raises(ArgumentError) as caught:
        TorchModel(Pixels(), inputs={"image": entry, "mask": "mask"}, optimizer=SGD)
    assert caught.value.argument.partition(".")[0] == "inputs"
    assert message in str(caught.value)


def test_a_batch_that_cannot_become_tensors_comes_before_the_update():
    model = TorchModel(Affine(), optimizer=SGD, device="cpu")
    model.run(XY[0], True, "train")
    assert model.has_updated
    with pytest.raises(StreamError):
        model.run({"x": ["a"], "y": [1.0]}, True, "train")
    assert not model.has_updated


def test_parameters_that_go_by_name_only_are_passed_by_name():
    class Named(Affine):
        def forward(self, *, x, y):
            return super().forward(x, y)

    for module, inputs in ((Named(), None), (Named(), ["y", "x"]), (Named(), {"x": "x", "y": "y"})):
        outputs = TorchModel(module, inputs=inputs).run({"x": [1.0, 2.0], "y": [1.0, 3.0]}, False, "valid")
        assert outputs["loss"].tolist() == [0.0, 1.0]


class Encoding(UserDict):
    """A mapping that is not a dict, as a tokenizer returns."""


@pytest.mark.parametrize("kind", [dict, Encoding])
def test_forward_gets_a_mapping_of_tensors_for_a_source_that_is_a_mapping(kind):
    module = Two()
    tokens = kind(ids=np.array([[1, 2]], np.int32), inner={"weight": [0.5], "seen": [True]})
    evaluate(TorchModel(module, inputs={"a": "tokens", "b": "b"}), [{"tokens": tokens, "b": [1.0]}])
    found = module.called[0]
    assert {type(found), type(found["inner"])} == {dict}
    assert [found["ids"].dtype, *(each.dtype for each in found["inner"].values())] == [
        torch.int64,
        torch.float32,
        torch.bool,
    ]


def test_the_dtype_of_a_mapping_is_that_of_all_its_parts():
    module = Two()
    source = {"image": np.ones((1, 2), np.uint8), "mask": np.ones(1, np.int16)}
    evaluate(TorchModel(module, inputs={"a": {"dtype": "keep"}, "b": "b"}), [{"a": source, "b": [1.0]}])
    assert [each.dtype for each in module.called[0].values()] == [torch.uint8, torch.int16]


def test_a_part_of_a_mapping_that_cannot_become_a_tensor_is_named():
    with pytest.raises(StreamError, match=r"source 'a.inner.text' cannot become a tensor: .*str"):
        evaluate(TorchModel(Two()), [{"a": {"ids": [1], "inner": {"text": ["x"]}}, "b": [1.0]}])


def test_an_error_in_forward_describes_the_parts_of_a_mapping_and_nested_tensors():
    class Breaks(Keep):
        def forward(self, a, b):
            raise ValueError

    batch = {"a": {"ids": [[1, 2]]}, "b": torch.nested.nested_tensor([[1.0, 2.0]], layout=torch.jagged)}
    with pytest.raises(ValueError) as caught:
        evaluate(TorchModel(Breaks()), [batch])
    assert "a.ids: int64 (1, 2) from 1 to 2, b: NestedTensor" in "\n".join(caught.value.__notes__)


def test_a_nested_tensor_stays_nested_and_gets_the_dtype_of_the_module():
    module = Two()
    values = torch.nested.nested_tensor([[1.0], [2.0, 3.0]], dtype=torch.float64, layout=torch.jagged)
    evaluate(TorchModel(module), [{"a": [1.0, 2.0], "b": values}])
    found = module.called[1]
    assert (found.is_nested, found.dtype) == (True, torch.float32)
    assert [each.tolist() for each in found.unbind()] == [[1.0], [2.0, 3.0]]


def tensor_of(value, **form):
    """Return what forward gets of a source, behind a batch of the usual kind."""
    module = Identity()
    batches = [{"x": np.float32([1])}, {"x": value() if callable(value) else value}]
    evaluate(TorchModel(module, inputs={"x": form} if form else ["x"], device="cpu"), batches)
    return module.called[0]


class Identity(Keep):
    def forward(self, x):
        return self.keep(x)


MASKED = np.ma.array(np.float32([1, 2]), mask=[False, True])
LARGE = np.array([2**63 + 1, 1], dtype=np.uint64)
WIDE, HELD = np.array([1.0, 1e300]), r"has 1e\+300, which float32 cannot hold"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (LARGE, "has 9223372036854775809, which int64 cannot hold"),
        ([LARGE], "has 9223372036854775809, which int64 cannot hold"),
        (torch.tensor([2**63], dtype=torch.uint64), "has 9223372036854775808, which int64 cannot hold"),
        (WIDE, HELD),
        (torch.tensor(WIDE), HELD),
        (torch.tensor(WIDE, requires_grad=True), HELD),
        ([WIDE, np.float32([1, 2])], HELD),
        (WIDE.tolist(), HELD),
        ([WIDE.tolist()], HELD),
        (tuple(WIDE), HELD),
        (array("d", WIDE), HELD),
        (memoryview(WIDE), HELD),
        (WIDE.astype(">f8"), HELD),
        (WIDE[::-1], HELD),
        (np.broadcast_to(WIDE, (2, 2)), HELD),
        (np.array([np.nan, np.inf, 1e300]), HELD),
        ([np.nan, np.inf, 1e300], HELD),
        (torch.diag(torch.tensor(WIDE)).to_sparse(), HELD),
        (lambda: torch.diag(torch.tensor(WIDE)).to_sparse_csr(), HELD),
        (lambda: torch.nested.nested_tensor([torch.tensor(WIDE)]), HELD),
        (MASKED, r"masked entries; yield `\.filled\(NUMBER\)`"),
        ([MASKED, MASKED], "masked entries"),
        (np.ma.array([1, 2], mask=[True, False]), "masked entries"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"quantised; .*`\.dequantize\(\)`"),
        (np.array([1.5], np.longdouble), "longdouble"),
        (np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]), "void"),
        (np.array(["2020-01-01"], "M8[D]"), "datetime64"),
        (np.array([1, None], object), "object_"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_source_that_would_lose_values_is_refused(value, reason):
    with pytest.raises(StreamError, match=rf"source 'x' .*{reason}"):
        tensor_of(value)


def test_a_part_that_would_lose_values_is_named():
    with pytest.raises(StreamError, match=r"source 'x\.a' has 1e\+300, which float32 cannot hold"):
        tensor_of({"a": WIDE})


@pytest.mark.parametrize(
    ("value", "form", "reason"),
    [
        ([256], {"dtype": "uint8"}, "256, which uint8"),
        ([-1], {"dtype": "uint8"}, "-1, which uint8"),
        (np.int64([1, -1]), {"dtype": "uint64"}, "-1, which uint64"),
        ([0.0, 0.75], {"dtype": "int64"}, "0.75, which int64"),
        ([0.0, np.nan], {"dtype": "int64"}, "nan, which int64"),
        (torch.tensor([0.5], dtype=torch.bfloat16), {"dtype": "int32"}, "0.5, which int32"),
        ([2**40], {"dtype": "int32"}, "1099511627776, which int32"),
        ([70000.0], {"dtype": "float16"}, "70000.0, which float16"),
        ([70000], {"dtype": "float16"}, "70000, which float16"),
        (WIDE, {"scale": 2.0}, "1e.300, which float32"),
    ],
)
def test_a_form_that_a_value_does_not_have_is_refused(value, form, reason):
    with pytest.raises(StreamError, match=rf"source 'x' has {reason}"):
        tensor_of(value, **form)


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        (np.array([np.nan, np.inf, -np.inf, 3e38]), {}, [np.nan, np.inf, -np.inf, 3e38]),
        ([np.nan, -np.inf], {}, [np.nan, -np.inf]),
        (np.full(4, 2e38), {}, [2e38] * 4),
        (np.array([1e-300, 0.1]), {}, [0, 0.1]),
        (np.array([255, 0]), {"dtype": "uint8"}, [255, 0]),
        (np.array([0, 255]), {"dtype": "bool"}, [0, 1]),
        (np.array([1.0, 0.0]), {"dtype": "int64"}, [1, 0]),
        (np.array([60000.0, 60000]), {"dtype": "float16"}, [60000, 60000]),
        (np.zeros((2, 0)), {}, np.zeros((2, 0))),
        (np.array([True]), {"dtype": "float32"}, [1]),
    ],
)
def test_values_that_a_dtype_can_hold_pass(value, form, expected):
    found = tensor_of(value, **form)
    assert np.array_equal(found.numpy(), np.asarray(expected).astype(found.numpy().dtype), equal_nan=True)


@pytest.mark.parametrize("wide", [WIDE, WIDE.tolist()], ids=["array", "list"])
def test_what_the_message_about_wide_numbers_says_keeps_them(wide):
    found = tensor_of(wide, dtype="keep")
    assert (found.dtype, found.tolist()) == (torch.float64, WIDE.tolist())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1e300 + 1j], torch.tensor([1e300 + 1j], dtype=torch.complex128)),
        (np.array([2**63 - 1, 1], np.uint64), torch.tensor([2**63 - 1, 1])),
        (np.array([2**32 - 1], np.uint32), torch.tensor([2**32 - 1])),
        (np.array([2**16 - 1], np.uint16), torch.tensor([2**16 - 1])),
        (np.array([1.5, 2], ">f4"), torch.tensor([1.5, 2])),
        (np.array([1, 2**40], ">i8"), torch.tensor([1, 2**40])),
        ([np.array([1.5], ">f8")], torch.tensor([[1.5]])),
        (np.ma.array(np.float32([1, 2])), torch.tensor([1.0, 2])),
        (np.array([1 + 2j]), torch.tensor([1 + 2j], dtype=torch.complex128)),
    ],
)
def test_a_source_of_another_kind_of_array_keeps_its_values(value, expected):
    found = tensor_of(value)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_what_the_message_about_large_numbers_says_keeps_them():
    found = tensor_of(LARGE, dtype="keep")
    assert (found.dtype, found.tolist()) == (torch.uint64, LARGE.tolist())
    assert tensor_of(LARGE.astype(np.float64)).tolist() == [2.0**63, 1]


@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 2))])
@pytest.mark.filterwarnings("ignore")
def test_a_module_of_torch_jit_has_a_signature(make):
    model = TorchModel(make(nn.Linear(2, 1)), outputs=["out"], device="cpu")
    assert list(model.input_names) == ["input"]
    (outputs,) = evaluate(model, [{"input": np.ones((3, 2), np.float32)}])
    assert outputs["out"].shape == (3, 1)


@pytest.mark.parametrize(
    ("loss", "target", "dtype"),
    [
        (nn.BCEWithLogitsLoss, [[1, 0], [0, 1]], "float32"),
        (nn.CrossEntropyLoss, [1.0, 0.0], "int64"),
    ],
)
def test_the_advice_for_a_target_of_another_dtype_works(loss, target, dtype):
    def trained(**inputs):
        form = Factory(loss, options={"inputs": ["out", "y"]})
        model = TorchModel(nn.Linear(2, 2), {"input": "x", **inputs}, ["out"], form, optimizer=SGD, device="cpu")
        return run(model, [{"x": np.ones((2, 2), np.float32), "y": target}])

    with pytest.raises(RuntimeError) as caught:
        trained()
    (note,) = [each for each in caught.value.__notes__ if "model.inputs" in each]
    assert f"dtype: {dtype}}}}}" in note
    trained(y={"dtype": dtype})
