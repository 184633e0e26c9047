"""The modules of emrun's bases."""

import re
from urllib.error import URLError

import pytest
import torch

from emrun import TorchModel, create_training
from emrun.base.errors import ArgumentError, ConfigError
from emrun.models.networks import MaskNet, PictureNet, SeriesNet, TableNet, TextNet, chat_model, text_model


@pytest.mark.parametrize(("numbers", "categories"), [(3, 0), (0, 2), (3, 2)])
@pytest.mark.parametrize("hidden", [[], [8, 4]])
def test_rows_have_numbers_or_categories_or_both(numbers, categories, hidden):
    net = TableNet(numbers, categories, 5 * categories, 4, hidden)
    rows = torch.zeros(1, numbers), torch.zeros(1, categories, dtype=torch.int64)
    assert net(*rows).shape == (1, 4)
    assert all(each.numel() for each in net.parameters())


def test_rows_have_something():
    with pytest.raises(ArgumentError, match="there is no column to predict from"):
        TableNet(0, 0, 0, 1)


def test_a_series_is_told_in_all_its_columns():
    assert SeriesNet(6, 2, 3, 1, [])(torch.zeros(4, 6, 2)).shape == (4, 3, 1)


@pytest.mark.parametrize("size", [8, 33])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_small_network_takes_any_size_and_a_batch_of_one(size, channels):
    assert PictureNet(5).train()(torch.zeros(1, channels, size, size)).shape == (1, 5)


def test_the_small_network_has_no_weights_to_begin_with():
    with pytest.raises(ArgumentError, match="no weights of the model 'small'"):
        PictureNet(5, pretrained=True)
    assert PictureNet(5).weights_to_begin_with is None


@pytest.mark.parametrize("size", [(8, 8), (5, 9), (1, 3)])
def test_pixels_have_classes_in_pictures_of_any_size(size):
    assert MaskNet(3, width=6)(torch.zeros(2, 1, *size)).shape == (2, 3, *size)


class Weights:
    url = "https://example.org/weights-1a2b.pth"

    @classmethod
    def get_state_dict(cls, **options):
        """Find the file, as torch does if it has downloaded it before."""


def test_a_new_run_begins_with_the_weights_of_torchvision_and_an_evaluation_does_not_read_them(tmp_path, monkeypatch):
    models = pytest.importorskip("torchvision.models")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(models, "get_model_weights", lambda name: type("Enum", (), {"DEFAULT": Weights}))
    known = models.get_model("squeezenet1_1", weights=None)
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(known.state_dict(), tmp_path / "hub" / "checkpoints" / "weights-1a2b.pth")
    module = PictureNet(4, "squeezenet1_1", pretrained=True)
    model = TorchModel(module, ["image"], ["logits"])
    assert not torch.equal(module.net.features[0].weight, known.features[0].weight)
    model.load_initial()
    torch.testing.assert_close(module.net.features[0].weight, known.features[0].weight)
    assert module(torch.zeros(1, 1, 64, 64)).shape == (1, 4)


@pytest.mark.parametrize(
    "error", [URLError(OSError("Name or service not known")), RuntimeError("invalid hash value")], ids=str
)
def test_weights_that_cannot_be_downloaded_are_an_error_at_their_line(error, tmp_path, monkeypatch):
    models = pytest.importorskip("torchvision.models")

    class Unreachable(Weights):
        @classmethod
        def get_state_dict(cls, **options):
            raise error

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(models, "get_model_weights", lambda name: type("Enum", (), {"DEFAULT": Unreachable}))
    (tmp_path / "c.yaml").write_text(
        "dataset: {class: Digits}\n"
        "model:\n"
        "  module:\n"
        "    class: emrun.models.networks.PictureNet\n"
        "    classes: 10\n"
        "    model: squeezenet1_1\n"
        "    pretrained: true\n"
        "  loss: {class: CrossEntropyLoss, inputs: [logits, label]}\n"
        "  outputs: [logits]\n"
        "  optimizer: {class: SGD, lr: 0.1}\n"
        "hooks: [{StopAfter: {epochs: 1}}]\n"
    )
    with pytest.raises(ConfigError) as raised:
        create_training(tmp_path / "c.yaml", output_dir=tmp_path / "run")
    message = str(raised.value)
    assert re.search(r"c\.yaml:7:17: model\.module\.pretrained: https://example\.org/weights-1a2b\.pth cannot", message)
    assert str(getattr(error, "reason", error)) in message
    assert f"copy that file to {tmp_path / 'hub' / 'checkpoints' / 'weights-1a2b.pth'}, or write false" in message
    assert not (tmp_path / "run").exists()


def test_an_unknown_model_is_answered_with_the_nearest():
    pytest.importorskip("torchvision.models")
    with pytest.raises(ArgumentError, match="there is no model 'resnet81'; did you mean 'resnet18'"):
        PictureNet(4, "resnet81")


@pytest.mark.parametrize("kind", [PictureNet, MaskNet])
def test_one_class_is_nothing_to_tell_apart(kind):
    with pytest.raises(ArgumentError, match="the data have 1 class, so that there is nothing to tell apart"):
        kind(1)


def test_padding_of_texts_changes_nothing():
    net = TextNet(20, 3, width=8).eval()
    tokens = torch.randint(0, 20, (2, 5))
    whole = net(tokens, torch.ones_like(tokens))
    padded = net(torch.nn.functional.pad(tokens, (0, 4), value=7), torch.tensor([[1] * 5 + [0] * 4] * 2))
    assert torch.allclose(whole, padded, atol=1e-6)


def test_models_of_directories_are_loaded_and_a_misspelt_one_is_an_error_with_the_nearest(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    config = transformers.BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    transformers.BertForSequenceClassification(config).save_pretrained("bert")
    assert text_model(30, 5, "bert")(torch.zeros(1, 4, dtype=torch.int64)).logits.shape == (1, 5)
    chat_model(40, width=32, layers=1).save_pretrained("llama")
    assert chat_model(40, "llama")(torch.zeros(1, 4, dtype=torch.int64)).logits.shape == (1, 4, 40)
    for make in (lambda: text_model(30, 5, "brt"), lambda: chat_model(40, "lama")):
        with pytest.raises(
            ArgumentError, match=r"cannot be loaded: .*; did you mean '(bert|llama)'.*; write 'small', a dir"
        ):
            make()
