"""The recipes of sample_configs do what docs/guide/recipes.md says; tests/test_sample_configs.py trains them."""

import json
import math
import re
import runpy
import shutil
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import torch
from doubles import Net
from safetensors.torch import load_file
from torch import nn

from emrun import TorchModel, read_steps

RECIPES = Path(__file__).parent.parent / "sample_configs" / "recipes"
SHORT = ["hooks.StopAfter.epochs=1", "main_loop.fixed_epoch_size=4", "main_loop.report=false"]


def names_of(file):
    return SimpleNamespace(**runpy.run_path(str(RECIPES / file)))


@pytest.fixture
def project(tmp_path):
    return shutil.copytree(RECIPES, tmp_path / "project")


def trained(kind, module, x, **more):
    model = kind(module, optimizer=partial(torch.optim.SGD, lr=0.1), device="cpu", **more)
    torch.manual_seed(7)
    for rows in x:
        model.run({"x": rows}, True, "train")
    return model


def test_sam_takes_the_gradients_at_the_worst_weights_nearby():
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    module, expected = Net(), Net()
    expected.load_state_dict(module.state_dict())
    trained(names_of("my_sam.py").Sam, module, [x], rho=0.5)
    expected(x)["loss"].mean().backward()
    before = [each.detach().clone() for each in expected.parameters()]
    norm = torch.nn.utils.get_total_norm([each.grad for each in expected.parameters()])
    with torch.no_grad():
        for each in expected.parameters():
            each += 0.5 / norm * each.grad
    gradients = torch.autograd.grad(expected(x)["loss"].mean(), list(expected.parameters()))
    for new, old, gradient in zip(module.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(new, old - 0.1 * gradient)


@pytest.mark.parametrize("more", [{}, {"accumulate": 2}, {"precision": "bf16"}, {"micro_batch_size": 3}], ids=str)
def test_sam_with_a_radius_of_0_is_a_plain_step_also_with_dropout_and_batch_norm(more):
    """So the weights come back, both forwards drop the same, and the running statistics count a batch once."""
    kind = partial(names_of("my_sam.py").Sam, rho=0.0)
    x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1))
    results = []
    for each in (kind, TorchModel):
        torch.manual_seed(0)
        module = Net(nn.BatchNorm1d(4), nn.Dropout(0.5))
        model = trained(each, module, x, **more)
        model.finish_update()
        results.append((module.state_dict(), torch.get_rng_state()))
    assert results[0][0].keys() == results[1][0].keys()
    for name, values in results[0][0].items():
        assert torch.equal(values, results[1][0][name]), name
    assert torch.equal(results[0][1], results[1][1])


def test_the_penalties_are_those_of_the_weights():
    penalties = names_of("my_penalties.py")
    module = nn.Linear(4, 2)
    (gradient,) = torch.autograd.grad(penalties.l2(module), module.weight)
    assert torch.equal(gradient, module.weight)
    with torch.no_grad():
        module.weight.copy_(torch.eye(2, 4))
    assert penalties.orthogonality(module) == 0
    with torch.no_grad():
        module.weight *= 2
    assert penalties.orthogonality(module) == 2 * 3**2


def test_the_range_test_goes_from_the_first_rate_to_the_last(project, emrun_here):
    done = emrun_here("train", "-q", "range_test.yaml", "--output-dir=run", cwd=project)
    assert (done.returncode, done.stderr) == (0, "")
    steps = read_steps(project / "run")
    rates = steps["learning_rate"]
    assert rates[0] == 1e-6
    assert np.diff(np.log(rates)) == pytest.approx(math.log(1e6) / len(rates))
    assert steps["loss"][-1] > steps["loss"].min() * 1.5  # at the end, the rate is too large


def files_in(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_checkpoints_are_uploaded_and_compared_on_a_resume(project, emrun_here):
    done = emrun_here("train", "-q", "upload.yaml", "--output-dir=run", *SHORT, cwd=project)
    assert (done.returncode, done.stderr) == (0, "")
    run, store = project / "run", project / "uploads" / "run"
    best, latest = ((run / "checkpoints" / name).resolve() for name in ("best", "latest"))
    assert ((store / "best.txt").read_text(), (store / "latest.txt").read_text()) == (best.name, latest.name)
    assert files_in(store / latest.name) == files_in(latest)
    (store / latest.name / "manifest.json").unlink()  # the process was killed during the upload
    (store / latest.name / "model.safetensors").write_bytes(b"half")
    (run / ".uploads" / "latest-it-1").mkdir(parents=True)
    done = emrun_here("resume", "-q", "run", "hooks.StopAfter.epochs=2", cwd=project)
    assert (done.returncode, done.stderr) == (0, "")
    assert files_in(store / latest.name)["model.safetensors"] != b"half"
    assert (store / "latest.txt").read_text() != latest.name
    assert not (run / ".uploads").exists()
    assert not latest.exists()
    shutil.copytree(store / latest.name, latest)
    assert emrun_here("eval", "-q", "run", "valid", "--checkpoint", latest.name, cwd=project).returncode == 0


def test_an_upload_that_fails_is_logged_and_does_not_end_the_run(project, emrun_here):
    wrong = "hooks.Upload.url=config.yaml/below"
    done = emrun_here("train", "upload.yaml", "--output-dir=run", *SHORT, wrong, "--no-progress", cwd=project)
    assert done.returncode == 0
    assert "cannot upload it-" in done.stderr
    assert json.loads((project / "run" / "metrics.jsonl").read_text().splitlines()[-1])["epoch"] == 1


def test_an_upload_has_a_copy_of_its_own_and_stores_need_no_directories(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "it-00000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (checkpoint / "model.safetensors").write_text("weights")
    hook = names_of("my_upload.py").Upload("memory://store", names=["best"], output_dir=tmp_path / "run")
    is_deleted = threading.Event()
    hook.thread.submit(is_deleted.wait)
    hook.after_checkpoint("latest", checkpoint)
    hook.after_checkpoint("best", checkpoint)
    shutil.rmtree(checkpoint)  # a later checkpoint takes the name before the upload begins
    is_deleted.set()
    hook.after_training()
    store = fsspec.filesystem("memory")
    assert store.cat_file("/store/run/it-00000007/model.safetensors") == b"weights"
    assert store.cat_file("/store/run/best.txt") == b"it-00000007"
    assert not store.exists("/store/run/latest.txt")


def test_diffusion_goes_back_to_the_data_if_the_directions_are_right():
    flow = names_of("my_diffusion.py").Flow(size=3)
    data = torch.tensor([[0.1, 0.5, 0.9]])
    flow.direction = lambda x, t: (x - (2 * data - 1)) / t
    torch.testing.assert_close(flow.sample(2, steps=10), data.expand(2, 3))
    flow = names_of("my_diffusion.py").Flow(size=3).eval()
    assert torch.equal(flow(data)["loss"], flow(data)["loss"])
    assert not torch.equal(flow.train()(data)["loss"], flow(data)["loss"])


def test_the_teacher_is_the_average_of_its_student(project, emrun):
    byol = names_of("my_byol.py")
    module = byol.Byol(width=4)
    with torch.no_grad():
        module.student[0].weight += 1
    before = module.teacher[0].weight.clone()
    hook = byol.MoveTeacher(decay=0.75)
    hook.register_mainloop(SimpleNamespace(model=SimpleNamespace(module=module)))
    hook.after_update()
    torch.testing.assert_close(module.teacher[0].weight, before + 0.25)


def test_stages_begin_with_the_stage_before_and_go_on(project, emrun_here):
    places = [project / "log" / stage for stage in ("byol", "probe")]
    for config in ("byol.yaml", "probe.yaml"):
        text = (project / config).read_text()
        text = text.replace("main_loop:\n", "main_loop:\n  fixed_epoch_size: 4\n  report: false\n")
        (project / config).write_text(re.sub(r"epochs: \d+", "epochs: 1", text))
    lines = [line for line in (project / "stages.sh").read_text().splitlines() if line.startswith("emrun ")]
    records = []
    for line in (*lines, *lines):
        done = emrun_here(*line.split()[1:], cwd=project)
        assert done.returncode == 0, done.stderr
        records.append([(each / "metrics.jsonl").read_bytes() for each in places if each.exists()])
    assert [len(each) for each in records] == [1, 2, 2, 2]
    assert records[1] == records[2] == records[3]
    byol, probe = (load_file(each / "checkpoints" / "latest" / "model.safetensors") for each in places)
    assert torch.equal(probe["0.0.weight"], byol["student.0.weight"])


def test_the_folds_are_parts_of_the_data():
    kind = names_of("my_folds.py").Folds
    folds = [kind(fold, folds=3).rows for fold in range(3)]
    assert sorted(np.concatenate([each["valid"] for each in folds])) == list(range(1797))
    assert all(sorted(np.concatenate(list(each.values()))) == list(range(1797)) for each in folds)


def test_rare_classes_are_drawn_as_often_as_the_others():
    data = names_of("my_weighted.py").Weighted()
    labels = data.parts["train"][1]
    assert np.bincount(labels)[[1, 7, 8]].max() < 20
    assert np.bincount(labels, weights=data.shares) == pytest.approx([0.1] * 10)


@pytest.mark.campaign
@pytest.mark.parametrize("how", [[], ["--kill"]], ids=["signal", "kill"])
@pytest.mark.parametrize(
    "config",
    ["mixup.yaml", "sam.yaml", "penalties.yaml", "upload.yaml", "diffusion.yaml", "byol.yaml", "weighted.yaml"],
)
def test_a_recipe_resumes_exactly(config, how, project, emrun):
    done = emrun("verify-resume", "-q", *how, config, cwd=project)
    assert done.returncode == 0, done.stdout
