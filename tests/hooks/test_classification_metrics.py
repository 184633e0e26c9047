"""ClassificationMetrics: the values of scikit-learn, from counts, for every form of predictions and labels."""

import json
import tracemalloc

import numpy as np
import pytest
import torch
from campaign import thinned
from sklearn import metrics as sklearn

from emrun import MainLoop, create_training, resume_training
from emrun.base.errors import ArgumentError, ConfigError, HookError, StreamError
from emrun.hooks import ClassificationMetrics, ComputeStats, StopAfter
from emrun.training.create import train

RNG = np.random.default_rng(0)
NAMES = ("precision", "recall", "f1")


class Labels:
    """Batches of labels, and possibly a mask; `x` has the number of the batch."""

    def __init__(self, *batches, names=None):
        self.batches = batches
        if names is not None:
            self.classes_names = names

    def valid_stream(self):
        for number, (labels, _, *masks) in enumerate(self.batches):
            yield {"x": [number] * len(labels), "label": labels, **({"mask": masks[0]} if masks else {})}

    train_stream = valid_stream


@pytest.fixture
def predicting(scripted):
    """Return a model that returns the predictions of a dataset."""
    return lambda dataset: scripted(lambda batch: {"prediction": dataset.batches[batch["x"][0]][1]})


@pytest.fixture
def evaluate(predicting):
    """Return what the hook writes for batches of (labels, predictions) or (labels, predictions, mask)."""

    def run(*batches, f1_average=None, names=None, **arguments):
        dataset = Labels(*batches, names=names)
        hook = ClassificationMetrics("prediction", "label", f1_average, dataset=dataset, **arguments)
        return MainLoop(predicting(dataset), dataset, [hook]).run_evaluation("valid")["valid"]

    return run


def drawn(classes, sizes=(40, 40, 7), used=None):
    """Return batches of labels and predictions, half of them right; only the first `used` classes occur."""
    batches = []
    for size in sizes:
        labels = RNG.integers(0, used or classes, size)
        guesses = RNG.integers(0, used or classes, size)
        batches.append((labels, np.where(RNG.random(size) < 0.5, labels, guesses)))
    return batches


def joined(batches):
    return [np.concatenate(each) for each in zip(*batches, strict=True)]


def specificity(labels, predictions):
    """Return the recall of `not this class`, for each class that occurs."""
    found = np.union1d(labels, predictions)
    values = [sklearn.recall_score(labels != each, predictions != each, zero_division=0) for each in found]
    return dict(zip(map(str, found), values, strict=True))


AVERAGES = [(*used, average) for used in ((2, 2), (2, 1), (5, 5), (7, 4)) for average in ("macro", "micro", "weighted")]


@pytest.mark.parametrize(
    ("classes", "used", "average"), thinned(AVERAGES, [each for each in AVERAGES if each[:2] in ((2, 1), (7, 4))])
)
def test_averages_are_those_of_scikit_learn(evaluate, classes, used, average):
    batches = drawn(classes, used=used)
    labels, predictions = joined(batches)
    names = [f"class {number}" for number in range(classes)]  # also of those that do not occur
    found = evaluate(*batches, f1_average=average, names=names)
    expected = sklearn.precision_recall_fscore_support(labels, predictions, average=average, zero_division=0)
    assert [found[name] for name in NAMES] == pytest.approx(list(expected[:3]), abs=1e-12)
    of_classes = specificity(labels, predictions)
    if average != "macro":
        assert found["accuracy"] == sklearn.accuracy_score(labels, predictions)
    else:
        assert found["accuracy"] == found["recall"]  # the mean of the accuracies of the classes
        assert found["specificity"] == pytest.approx(np.mean(list(of_classes.values())))
    if average == "weighted":
        weights = [np.sum(labels == int(each)) for each in of_classes]
        assert found["specificity"] == pytest.approx(np.average(list(of_classes.values()), weights=weights))


def test_micro_specificity_is_of_all_pairs_of_example_and_class(evaluate):
    batches = drawn(4)
    labels, predictions = (np.eye(4, dtype=bool)[each].ravel() for each in joined(batches))
    (below, _), _ = sklearn.confusion_matrix(labels, predictions)
    found = evaluate(*batches, f1_average="micro", names=list("abcd"))
    assert found["specificity"] == pytest.approx(below / np.sum(~labels))


def test_two_classes_have_the_values_of_class_1(evaluate):
    batches = drawn(2)
    labels, predictions = joined(batches)
    found = evaluate(*batches, f1_average="binary")
    expected = sklearn.precision_recall_fscore_support(labels, predictions, average="binary")
    assert [found[name] for name in NAMES] == pytest.approx(list(expected[:3]), abs=1e-12)
    (below, above), _ = sklearn.confusion_matrix(labels, predictions)
    assert found["specificity"] == pytest.approx(below / (below + above))
    assert list(found) == ["precision", "recall", "f1", "specificity", "accuracy"]


def test_the_ancestors_example(evaluate):
    batches = [([0, 0, 0], [0, 0, 0]), ([0, 1], [1, 1])]
    found = evaluate(*batches, f1_average="binary", var_prefix="metrics_")
    assert found == {
        "metrics_precision": 0.5,
        "metrics_recall": 1.0,
        "metrics_f1": 2 / 3,
        "metrics_accuracy": 0.8,
        "metrics_specificity": 0.75,
    }


@pytest.mark.parametrize("names", [None, ["cat", "dog", "eel", "fox", "gnu"]])
def test_without_an_average_there_is_a_value_for_each_class_and_their_mean(evaluate, names):
    batches = drawn(5)
    labels, predictions = joined(batches)
    found = evaluate(*batches, names=names)
    keys = names or [str(number) for number in range(5)]
    expected = sklearn.precision_recall_fscore_support(labels, predictions, zero_division=0)
    for name, values in zip(NAMES, expected[:3], strict=True):
        assert list(found[name]) == ["mean", *keys]
        assert found[name] == pytest.approx(dict(zip(["mean", *keys], [values.mean(), *values], strict=True)))
    assert [found["specificity"][key] for key in keys] == pytest.approx(list(specificity(labels, predictions).values()))


def test_classes_that_do_not_occur_are_0_and_do_not_count_in_the_mean(evaluate):
    found = evaluate(([0, 0, 1], [0, 0, 1]), names=["a", "b", "never"])
    assert found["f1"] == {"mean": 1.0, "a": 1.0, "b": 1.0, "never": 0.0}
    assert found["specificity"] == {"mean": 1.0, "a": 1.0, "b": 1.0, "never": 1.0}
    found = evaluate(([0, 0], [2, 2]), names=["a", "b", "c"])
    assert found["precision"] == {"mean": 0.0, "a": 0.0, "b": 0.0, "c": 0.0}


def logits_of(classes, count):
    return torch.nn.functional.one_hot(torch.as_tensor(classes), count) + torch.rand(len(classes), count) * 0.9


def test_predictions_and_labels_of_all_forms_give_the_same(evaluate):
    labels, predictions = drawn(4, (12,))[0]
    labels[0], expected = 3, None
    logits = logits_of(predictions, 4)
    grid = [torch.as_tensor(each).reshape(4, 3) for each in (labels, predictions)]
    forms = [
        (labels, predictions),
        (labels.tolist(), predictions.tolist()),
        (torch.as_tensor(labels), torch.as_tensor(predictions, dtype=torch.uint8)),
        (labels.astype("f4"), predictions.astype("f8")),
        (labels[:, None], predictions),
        (labels, predictions[:, None]),
        (labels, torch.as_tensor(predictions).bfloat16()[:, None]),
        (labels, logits),
        (labels[:, None], logits.half()),
        (labels, logits.numpy()),
        (labels, torch.nn.functional.one_hot(torch.as_tensor(predictions), 4).bool()),
        tuple(grid),
        (grid[0][:, None], logits.reshape(4, 3, 4).movedim(2, 1)),
        (grid[0], logits.reshape(4, 3, 4).movedim(2, 1)),
    ]
    for form in forms:
        found = evaluate(form)
        expected = expected or found
        assert found == expected


def test_a_mask_leaves_out_padding(evaluate):
    labels, predictions = drawn(3, (20,))[0]
    mask = RNG.random(20) < 0.6
    padded = np.where(mask, labels, -100)
    batches = [(padded[rows], predictions[rows], mask[rows].astype("i4")) for rows in (slice(0, 12), slice(12, 20))]
    found = evaluate(*batches, f1_average="macro", mask_name="mask")
    assert found == evaluate((labels[mask], predictions[mask]), f1_average="macro")
    with pytest.raises(StreamError, match=r"'mask' of shape \(2, 1\) does not fit 'label' of shape \(2,\); a mask"):
        evaluate(([0, 1], [0, 1], [[1], [1]]), mask_name="mask")


@pytest.mark.parametrize("average", ["binary", "micro", "macro", "weighted", None])
def test_a_stream_of_which_nothing_counts_is_0(evaluate, average):
    found = evaluate(([0, 0], [0, 1], [0, 0]), f1_average=average, mask_name="mask")
    assert found["accuracy"] == 0.0
    assert found["f1"] == ({"mean": 0.0} if average is None else 0.0)


def test_the_memory_does_not_grow_with_the_examples(evaluate):
    batch = np.zeros(10_000, "i8"), np.ones(10_000, "i8")
    evaluate(batch)
    tracemalloc.start()
    evaluate(*[batch] * 300, f1_average="macro")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000  # all classes would be 48 MB


def test_batches_in_the_same_memory_are_copied(scripted):
    class Again:
        def valid_stream(self):
            array = np.zeros(10, "i8")
            for number in range(3):
                array[:] = number
                yield {"x": array, "guess": torch.from_numpy(array)}

        train_stream = valid_stream

    hook = ClassificationMetrics("x", "guess", "macro")
    model = scripted(lambda batch: {})
    found = MainLoop(model, Again(), [hook]).run_evaluation("valid")["valid"]
    assert (found["accuracy"], hook.state_dict()["counts"]["valid"].tolist()) == (
        1.0,
        (10 * np.eye(3, dtype=int)).tolist(),
    )


NOT = "which is not the number of a class: they are whole numbers from 0 to"
WRONG_BATCHES = [
    (([0, 1], [0]), {}, "of shape (1,) does not fit 'label' of shape (2,); predictions are class numbers"),
    (([0, 1], torch.zeros(2, 3, 4)), {}, "'prediction' of shape (2, 3, 4) does not fit 'label' of shape (2,)"),
    (([0, 1], [0.0, 0.5]), {}, f"'prediction' has the value 0.5, {NOT}"),
    (([0, 1], [0.0, float("nan")]), {}, "'prediction' has the value nan, which is not the number of a class"),
    (([0, 1], torch.tensor([[0.2], [0.5]])), {}, "'prediction' has the value 0.2"),
    (([0.5, 1], [0, 1]), {}, "'label' has the value 0.5, which is not the number of a class"),
    (([-100, 1], [0, 1]), {}, f"'label' has the value -100, {NOT} 1,999; mask_name"),
    (([0, 1], [-1, 1]), {}, "'prediction' has the value -1, which is not the number of a class"),
    ((["cat", "dog"], [0, 1]), {}, "'label' has strings, or lists of different lengths; use the hook Flatten"),
    (([[0], [1, 1]], [0, 1]), {}, "'label' has strings, or lists of different lengths; use the hook Flatten"),
    (([0, 1], [0, 10**12]), {}, "'prediction' has the value 1000000000000, which is not the number of a class"),
    (([0, 3], torch.zeros(2, 3)), {}, f"'label' has the value 3, {NOT} 2;"),
    (([0, 1], torch.zeros(2, 3)), {"names": ["a", "b"]},
     "'prediction' of shape (2, 3) has 3 classes, but there can be 2, by classes_names"),
    (([0, 1], torch.zeros(2, 3)), {"classes_names": ["a", "b"]}, "has 3 classes, but there can be 2"),
    (([0, 2], [0, 1]), {"classes_names": ["a", "b"]},
     f"'label' has the value 2, {NOT} 1;"),
    (([0, 1], torch.zeros(2, 3)), {"f1_average": "binary"}, "has 3 classes, but there can be 2, by"),
    (([0, 2], [0, 1]), {"f1_average": "binary"}, f"'label' has the value 2, {NOT} 1;"),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "arguments", "message"), WRONG_BATCHES)
def test_what_are_not_classes_is_an_error_at_the_first_batch(evaluate, batch, arguments, message):
    with pytest.raises(StreamError) as caught:
        evaluate(batch, **arguments)
    assert str(caught.value).startswith("stream 'valid': ClassificationMetrics: ")
    assert message in str(caught.value)
    assert caught.value.exit_status == 2


def test_what_goes_wrong_later_is_an_error_too(evaluate):
    good = ([0, 1], torch.zeros(2, 3))
    for batch, message in (
        (([0, 3], torch.zeros(2, 3)), "the value 3"),
        (([0], torch.zeros(1, 4)), "but there can be 3"),
    ):
        with pytest.raises(StreamError, match=message) as caught:
            evaluate(good, batch)
        assert caught.value.exit_status == 1


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({"f1_average": "samples"}, "f1_average", "'samples' is not one of binary, micro, macro, weighted"),
        ({"classes_names": "ab"}, "classes_names", "'ab' is not a list of names"),
        ({"classes_names": []}, "classes_names", "the list needs a name for each class"),
        ({"classes_names": ["a", "b", "a"]}, "classes_names", "the list has 'a' twice"),
        ({"classes_names": ["mean", "b"]}, "classes_names", "'mean' is the name of the average"),
        ({"classes_names": ["a"], "f1_average": "binary"}, "f1_average", "'binary' needs two classes, not 1"),
        ({"streams": "valid"}, "streams", "'valid' is not a list of streams"),
    ],
)
def test_wrong_arguments(arguments, argument, message):
    with pytest.raises(ArgumentError) as caught:
        ClassificationMetrics("prediction", "label", **arguments)
    assert caught.value.argument == argument
    assert message in str(caught.value)


def test_a_name_that_another_hook_writes_is_an_error_before_the_training(scripted):
    def loop(*hooks):
        model = scripted(lambda batch: {"loss": 0.0, "accuracy": [1.0, 1.0], "prediction": [0, 1]})
        return MainLoop(model, Labels(([0, 1], [0, 1])), [*hooks, StopAfter(epochs=1)])

    for place in (0, 1):
        hooks = [ComputeStats(["accuracy"])]
        hooks.insert(place, ClassificationMetrics("prediction", "label"))
        with pytest.raises(HookError, match="ComputeStats writes 'accuracy' too; set another var_prefix") as caught:
            loop(*hooks)
        assert caught.value.hook_index == place
    other = ClassificationMetrics("prediction", "label", var_prefix="c_")
    assert loop(ComputeStats(["accuracy"]), other).run_training().status == "finished"


def test_the_names_that_a_later_compute_stats_takes_from_the_model_are_seen_too(digits_config, tmp_path):
    hooks = [{"ClassificationMetrics": {"predicted_variable": "logits", "gt_variable": "label"}}, "ComputeStats"]
    config = digits_config([*hooks, {"StopAfter": {"epochs": 1}}], batch_size=500)
    training = create_training(config, output_root=tmp_path)
    with pytest.raises(HookError, match="ComputeStats writes 'accuracy' too"):
        training.main_loop.run_training()


def test_the_yaml_in_its_docstring_trains(train_digits, in_docstring):
    training = train_digits(in_docstring(ClassificationMetrics))
    assert training.main_loop.metrics[-1]["streams"]["valid"]["class_f1"]["7"] > 0.5


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ({"variable": "class_f1", "aggregation": "7"}, None),
        ({"variable": "class_f1", "aggregation": "seven"}, "no hook writes 'class_f1/seven'"),
        ({"variable": "class_f1s"}, "no hook writes 'class_f1s/mean'; did you mean 'class_f1/mean'"),
    ],
)
def test_values_of_named_classes_can_be_monitored(digits_config, tmp_path, address, message):
    own = {"predicted_variable": "logits", "gt_variable": "label", "var_prefix": "class_"}
    hooks = [{"ClassificationMetrics": own}, {"SaveBest": address}, {"StopAfter": {"epochs": 1}}]
    config = digits_config(hooks, batch_size=500)
    if message is None:
        train(create_training(config, output_dir=tmp_path / "run"))
        assert (tmp_path / "run" / "checkpoints" / "best").exists()
        return
    with pytest.raises(ConfigError, match=message):
        create_training(config, output_dir=tmp_path / "run")


def test_streams_without_labels_are_left_out(predicting):
    class Unlabelled(Labels):
        def train_stream(self):
            yield {"x": [0, 0]}

    def outcome(**arguments):
        hooks = [ClassificationMetrics("prediction", "label", "macro", **arguments), StopAfter(epochs=1)]
        dataset = Unlabelled(([0, 1], [0, 1]))
        return MainLoop(predicting(dataset), dataset, hooks, extra_streams=["valid"]).run_training()

    with pytest.raises(StreamError, match="hook ClassificationMetrics reads 'label', which is neither a source"):
        outcome()
    assert outcome(streams=["valid"]).status == "finished"
    with pytest.raises(StreamError, match=r"a batch has no variable 'label' \(it has x, prediction\)"):
        outcome(streams=["train", "valid"])


@pytest.mark.parametrize("iterations", thinned([9, 12], [12]))
def test_a_resume_in_the_middle_of_an_epoch_is_exact(tmp_path, digits_config, iterations):
    own = {"predicted_variable": "logits", "gt_variable": "label"}
    config = digits_config([{"ClassificationMetrics": own}, {"StopAfter": {"epochs": 2}}], batch_size=200)
    train(create_training(config, output_dir=tmp_path / "straight"))
    train(create_training(config, output_dir=tmp_path / "run", overrides=[f"hooks.StopAfter.iterations={iterations}"]))
    train(resume_training(tmp_path / "run", overrides=["~hooks.StopAfter.iterations"]))
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("straight", "run")]
    straight, resumed = ([json.loads(line)["streams"] for line in each] for each in lines)
    assert straight == resumed
    assert len(straight) == 3


def test_other_variables_than_those_of_the_checkpoint_begin_anew(caplog):
    hook = ClassificationMetrics("prediction", "label")
    counts = {"train": torch.ones(2, 2, dtype=torch.int64)}
    for variables, names in ((["logits", "label"], None), (["prediction", "label"], ["a", "b"])):
        hook.load_state_dict({"variables": variables, "names": names, "counts": counts})
        assert hook.state_dict()["counts"] == {}
        assert "this epoch has only the counts of the batches after the checkpoint" in caplog.text
        caplog.clear()
    hook.load_state_dict({"variables": ["prediction", "label"], "names": None, "counts": counts})
    assert hook.state_dict()["counts"]["train"].tolist() == [[1, 1]] * 2
