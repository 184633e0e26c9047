"""`emrun report` and the page that a run writes: what is in it, and that nothing of a run gets to be more than text."""

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from campaign import thinned
from here import run_here

from emrun.cli import emrun as group
from emrun.record.metrics_log import MetricsLog
from emrun.record.steps import Chunk
from emrun.shown import Picture, Text

ROOT = Path(__file__).parent.parent.parent
SMALL = """\
seed: 1
name: small
dataset: {class: Digits, batch_size: 128}
model:
  module:
    class: torch.nn.Sequential
    args: [{class: torch.nn.Flatten}, {class: torch.nn.Linear, in_features: 64, out_features: 10}]
  inputs: [image]
  outputs: [logits]
  loss: {class: torch.nn.CrossEntropyLoss, inputs: [logits, label]}
  optimizer: {class: AdamW, lr: 0.01}
  scheduler: {class: Cosine}
main_loop: {extra_streams: [valid]}
hooks:
  - ComputeStats: {variables: [loss]}
  - LogProfile
  - StopAfter: {epochs: 2}
"""
HOSTILE = "<script>alert(1)</script></style>'\"&<!--\x1b[31m\u202e"


class Page(HTMLParser):
    """A page as a browser sees it: its text, its tags, its data and its policy."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts, self._open = [], [], []
        self.parts = {"style": [], "script": []}
        self.feed(html)
        self.close()
        self.text = " ".join(" ".join(self.texts).split())
        self.data = json.loads(next(text for text in self.parts["script"] if text.startswith("{")))
        self.policy = next(each["content"] for name, each in self.tags if name == "meta" and "http-equiv" in each)

    def handle_starttag(self, name, attributes):
        self.tags.append((name, dict(attributes)))
        self._open.append(name)
        if name in self.parts:
            self.parts[name].append("")

    def handle_endtag(self, name):
        while self._open and self._open.pop() != name:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1] in self.parts:
            self.parts[self._open[-1]][-1] += data
        else:
            self.texts.append(data)


def page(path):
    return Page(path.read_text(encoding="utf-8"))


def lines_of(found, title):
    return {line["label"]: line for chart in found.data["charts"] if chart["title"] == title for line in chart["lines"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with the run `run` of a small config."""
    place = tmp_path_factory.mktemp("project")
    (place / "config.yaml").write_text(SMALL)
    done = run_here(["train", "-q", "config.yaml", "--output-dir", "run"], place)
    assert done.returncode == 0, done.stderr
    return place


def test_a_run_writes_its_page_at_its_end(trained):
    found = page(trained / "run" / "report.html")
    for text in (
        "✓ finished",
        "2 epochs",
        "emrun train -q config.yaml --output-dir run",
        "Where the time of epoch 2 went",
        "Cosine",
    ):
        assert text in found.text
    metrics = [json.loads(line) for line in (trained / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = [epoch["streams"]["valid"]["loss"]["mean"] for epoch in metrics]
    valid = lines_of(found, "loss")["valid"]
    assert valid["x"] == [0, 1, 2]
    assert valid["y"] == pytest.approx(expected, rel=1e-5)
    rates = lines_of(found, "learning_rate")["train"]
    steps = json.loads((trained / "run" / "steps.jsonl").read_text().splitlines()[0])
    assert rates["y"][0] == pytest.approx(steps["learning_rate"][0])


def test_a_page_needs_nothing_else_and_runs_nothing_else(trained):
    found = page(trained / "run" / "report.html")
    style, scripts = found.parts["style"], [each for each in found.parts["script"] if not each.startswith("{")]
    assert len(style) == len(scripts) == 1
    for kind, content in (("style", style[0]), ("script", scripts[0])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in found.policy
    assert found.policy.startswith("default-src 'none'; ")
    assert "unsafe" not in found.policy
    for name, attributes in found.tags:
        assert not {"style", "onclick", "onload", "onerror"} & attributes.keys(), name
        assert name not in ("link", "iframe", "object", "base")
        assert attributes.get("src", "data:").startswith("data:")
        assert attributes.get("href", "#").startswith("#")


def test_the_page_is_the_same_when_it_is_written_again(trained, emrun_here):
    def body(path):
        return re.sub(r"Written by .*", "", path.read_text())

    done = emrun_here("report", "run", "-o", "again.html", cwd=trained)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"again.html \(1 run, [\d.]+ KB\)\n", done.stdout)
    assert body(trained / "again.html") == body(trained / "run" / "report.html")


@pytest.mark.parametrize(
    ("overrides", "status", "said"),
    [
        (["model.loss.class=torch.nn.MSELoss"], 1, "✕ failed"),
        (["hooks=[ComputeStats: {variables: [loss]}, StopAfter: {iterations: 1}]"], 0, "✓ finished"),
        (["main_loop.report=false", "hooks.StopAfter.epochs=1"], 0, None),
    ],
)
def test_the_page_of_a_run_that_failed_or_hardly_began(trained, emrun_here, tmp_path, overrides, status, said):
    shutil.copy(trained / "config.yaml", tmp_path)
    done = emrun_here("train", "-q", "config.yaml", *overrides, "--output-dir", "run")
    assert done.returncode == status, done.stderr
    path = tmp_path / "run" / "report.html"
    assert path.exists() == (said is not None)
    if said == "✕ failed":
        found = page(path)
        assert said in found.text
        assert "Traceback (most recent call last)" in found.text
        assert "stream train, epoch 0, iteration 0, batch 0" in found.text
        assert "emrun replay run/failures/1" in found.text
    elif said is not None:
        assert said in page(path).text


def test_a_page_that_cannot_be_written_is_a_warning(trained, emrun_here, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "report.html").unlink()
    (tmp_path / "run" / "report.html").mkdir()
    done = emrun_here("resume", "run", "--checkpoint", "latest")
    assert done.returncode == 0
    assert "run/report.html was not written: UsageError: " in done.stderr
    assert "page: run/report.html" not in done.stdout
    assert "finished" in (tmp_path / "run" / "trace.yaml").read_text()


def test_a_file_that_is_no_page_is_overwritten_only_if_wanted(make_run, emrun_here, tmp_path):
    make_run("a", [0.1, 0.5])
    (tmp_path / "notes.html").write_text("<!DOCTYPE html>\n<html>mine")
    refused = emrun_here("report", "log/a", "-o", "notes.html")
    assert (refused.returncode, (tmp_path / "notes.html").read_text()) == (2, "<!DOCTYPE html>\n<html>mine")
    assert "notes.html exists, and is not a page of emrun; choose another file" in refused.stderr
    for options in (["--overwrite"], []):
        assert emrun_here("report", "log/a", "-o", "notes.html", *options).returncode == 0


def test_runs_are_compared(make_run, emrun_here, tmp_path):
    for index, (rate, accuracy) in enumerate([(0.001, 0.5), (0.01, 0.9), (0.1, 0.7), (0.1, 0.8)]):
        config = f"seed: {index}\nmodel:\n  optimizer: {{class: AdamW, lr: {rate}}}\n"
        config += "hooks:\n  - SaveBest: {variable: accuracy, condition: max}\n"
        make_run(f"trial-{index}", [0.1, accuracy], config=config)
    done = emrun_here("report", "log")
    assert done.stdout.startswith("log/report.html (4 runs, ")
    found = page(tmp_path / "log" / "report.html")
    assert "4 runs: 4 finished" in found.text
    table = found.text[found.text.index("highest valid/accuracy") :]
    assert table.index("trial-1") < table.index("trial-3") < table.index("trial-2") < table.index("trial-0")
    repeats = found.text[found.text.index("Repeats") :]
    assert "trial-2, trial-3 0.1 2 0.75 0.0707107" in repeats
    assert "trial-1" not in repeats[: repeats.index("Parameters and")]
    pictures = [each["aria-label"] for name, each in found.tags if name == "svg" and "aria-label" in each]
    assert pictures == ["highest valid/accuracy against model.optimizer.lr"]
    assert set(lines_of(found, "valid/accuracy")) == {f"trial-{index}" for index in range(4)}
    colors = {line["label"]: line["color"] for chart in found.data["charts"] for line in chart["lines"]}
    assert all(line["color"] == colors[line["label"]] for chart in found.data["charts"] for line in chart["lines"])
    by_loss = emrun_here("report", "log/trial-0", "log/trial-1", "-o", "two.html", "--by", "min:valid/loss")
    assert by_loss.returncode == 0
    assert "lowest valid/loss" in page(tmp_path / "two.html").text


def add_statistics(run, **streams):
    """Add statistics to each epoch of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for stream, added in streams.items():
            line["streams"][stream].update(added)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_many_classes_have_one_chart_and_equal_rates_too(make_run, emrun_here, tmp_path):
    f1 = {"mean": 0.5, **{str(number): number / 10 for number in range(10)}}
    rates = {"learning_rate": 0.1, "learning_rate_1": 0.1, "learning_rate_2": 0.2}
    for name in "ab":
        make_run(name, [0.1, 0.5])
        add_statistics(tmp_path / "log" / name, train=rates, valid={"f1": f1})
    assert emrun_here("report", "log/a").returncode == 0
    found = page(tmp_path / "log" / "a" / "report.html")
    titles = [chart["title"] for chart in found.data["charts"]]
    assert titles == ["loss", "accuracy", "accuracy/std", "f1", "valid/f1 by class", "learning_rate", "learning_rate_2"]
    assert list(lines_of(found, "valid/f1 by class")) == list("0123456789")
    assert emrun_here("report", "log").returncode == 0
    titles = [chart["title"] for chart in page(tmp_path / "log" / "report.html").data["charts"]]
    assert [title for title in titles if "f1" in title] == ["valid/f1"]


@pytest.mark.parametrize(("best", "condition"), [(2, "max"), (1, "min")])
def test_of_equal_values_the_earliest_epoch_is_the_best_on_the_page_as_elsewhere(
    make_run, emrun_here, tmp_path, best, condition
):
    config = f"hooks:\n  - SaveBest: {{variable: accuracy, condition: {condition}}}\n"
    make_run("a", [0.5, 0.25, 0.75, 0.75, 0.25], config=config)
    assert emrun_here("report", "log/a").returncode == 0
    assert (
        f"{condition.replace('max', 'highest').replace('min', 'lowest')} valid/accuracy, epoch {best})"
        in page(tmp_path / "log" / "a" / "report.html").text
    )
    (row,) = json.loads(emrun_here("ls", "log", "--json").stdout)
    assert row["best"]["epoch"] == best


def test_what_hooks_show_is_on_the_page_once(make_run, emrun_here, tmp_path):
    run, content = make_run("a", [0.5]).directory, b"\x89PNG\r\n\x1a\n" + bytes(16)
    (run / "same.png").write_bytes(content)
    record = MetricsLog(run)
    shown = {"valid/sheet": Picture(content), "look": Picture(content + b"1"), "poem": Text("<b>two\nlines</b>")}
    record.add_epoch(1, 10, 10, 0.5, {}, shown)
    assert emrun_here("report", "log/a").returncode == 0
    found = page(run / "report.html")
    assert [each["alt"] for name, each in found.tags if name == "img"] == ["same.png", "look"]
    assert "poem <b>two lines</b>" in found.text[found.text.index("Texts") :]


def test_peaks_of_steps_are_in_the_page_and_values_that_are_not_finite_are_counted(make_run, emrun_here, tmp_path):
    values = [1.0] * 20_000
    values[12_345], values[17] = 99.5, math.nan
    chunks = [Chunk(first + 1, 1, {"loss": values[first : first + 1_000]}) for first in range(0, 20_000, 1_000)]
    make_run("a", [0.5], steps=chunks)
    assert emrun_here("report", "log/a").returncode == 0
    found = page(tmp_path / "log" / "a" / "report.html")
    line = lines_of(found, "loss")["train"]
    steps = next(each for each in found.data["charts"] if each["x"] == "iteration")["lines"][0]
    assert [12_346, 99.5] in [list(pair) for pair in zip(steps["x"], steps["y"], strict=True)]
    assert [18, None] in [list(pair) for pair in zip(steps["x"], steps["y"], strict=True)]
    assert "train: 1 value is not finite, the first at 18" in found.text
    assert line


def hostile(run, tmp_path):
    """Put hostile text wherever a run has text."""
    place = run.directory
    text = json.dumps(HOSTILE)
    (place / "trace.yaml").write_text(
        f"status: failed\nepochs_done: 1\niterations_done: 10\nseed: 1\nreason: {text}\ncommand: [{text}]\n"
        f"host: {text}\ndevice: {text}\ntrain_begin: {text}\nresumes: [{{time: {text}, changed: {text}}}]\n"
    )
    (place / "config.yaml").write_text(f"seed: 1\n{text}: {text}\nmodel: {{a: {text}}}\n")
    line = {"epoch": 1, "iteration": 10, "seconds": 1.0, "streams": {HOSTILE: {HOSTILE: {HOSTILE: 1.0, "mean": "NaN"}}}}
    lines = [line, {**line, "epoch": 2, "streams": {"valid": {"loss": "Infinity", "x": [[]], "y": 10**400}}}]
    (place / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), "{", '{"epoch": 1e999}', ""]))
    (place / "steps.jsonl").write_text(
        json.dumps({"format": 1, "from": 1, "every": 1, HOSTILE: ["NaN", 1e300, -1e300]})
    )
    (place / "train.log").write_text(f"2026-11-20 10:00:00.000: ERROR   @{HOSTILE}: {HOSTILE}\n{HOSTILE}\n")
    (place / "failures" / "1").mkdir(parents=True)
    (place / "failures" / "2").mkdir()
    (place / "failures" / "1" / "failure.json").write_text(
        json.dumps({"error": HOSTILE, "message": HOSTILE, "step": {"stream": HOSTILE}})
    )
    (place / "checkpoints" / "it-00000010").mkdir(parents=True)
    (place / "checkpoints" / "it-00000010" / "manifest.json").write_text("{")
    (place / "<img src=x onerror=alert(1)>").mkdir()
    (place / "<img src=x onerror=alert(1)>" / "x'\".svg").write_text("<svg onload='alert(1)'/>")
    (place / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "secret.png").write_text("secret")


def test_a_hostile_run_is_only_text(make_run, emrun_here, tmp_path):
    run = make_run("a<b>&'c", [0.5], steps=[])
    run.release()
    hostile(run, tmp_path)
    make_run("good", [0.5, 0.6], steps=[])
    for arguments in (["log/a<b>&'c"], ["log"]):
        done = emrun_here("report", *arguments, "-o", "page.html")
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        assert "could not be read" in done.stdout
        text = (tmp_path / "page.html").read_text(encoding="utf-8")
        found = page(tmp_path / "page.html")
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert base64.b64encode(b"secret").decode() not in text
        assert text.count("<script") == text.count("</script>") == 2
        assert text.count("<style") == 1
        assert not any("onerror" in each or "onload" in each for _, each in found.tags)
        assert "alert(1)" in found.text
        said = found.text[found.text.index("What could not be read") :]
        for what in (
            "metrics.jsonl: line 3 is damaged or not of an epoch; it is ignored, and 1 more",
            "checkpoint it-00000010 is damaged",
            "failures/2 is damaged",
        ):
            assert what in said


def test_a_page_of_many_names_and_large_files_stays_small(make_run, emrun_here, tmp_path):
    run = make_run("a", [0.5], steps=[])
    with (run.directory / "metrics.jsonl").open("a") as file:
        many = {f"v{index}": {"mean": 0.5} for index in range(11_000)}
        file.write(json.dumps({"epoch": 1, "iteration": 1, "seconds": 1, "streams": {"train": many}}) + "\n")
        file.write("x" * 3_100_000 + "\n")
    with (run.directory / "train.log").open("a") as file:
        file.write("x" * 2_000_000 + "\n2026-11-20 10:00:00.000: INFO    @x: the end\n")
    assert emrun_here("report", "log/a").returncode == 0
    path = run.directory / "report.html"
    found = page(path)
    assert path.stat().st_size < 2_000_000
    assert "more statistics not shown: there are too many" in found.text
    assert "is damaged or not of an epoch" in found.text


DAMAGED = ["trace.yaml", "config.yaml", "metrics.jsonl", "steps.jsonl"]
DAMAGES = [b"", b"\xff\xfe\x00", b"{", b"[1, 2", None]


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("content", thinned(DAMAGES, DAMAGES[1:3]))
def test_a_damaged_run_has_a_page(make_run, emrun_here, name, content):
    run = make_run("a", [0.5], steps=[Chunk(1, 1, {"loss": [1.0]})])
    (run.directory / name).unlink()
    if content is not None:
        (run.directory / name).write_bytes(content)
    done = emrun_here("report", "log/a")
    assert done.returncode == 0, done.stderr
    assert page(run.directory / "report.html").text


def test_what_is_not_a_run_is_an_error_of_one_line(make_run, emrun_here, tmp_path):
    make_run("a", [0.5])
    make_run("b", [0.5])
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        (["empty"], "empty is neither a run nor a directory with runs; emrun ls -r looks below it"),
        (["missing"], "missing does not exist; give a directory with runs, or a run"),
        (["log/a", "log/b"], "several directories: name the file, such as -o report.html"),
        (["log", "--by", "min:valid/los"], "--by: no run has recorded the statistic 'valid/los'; did you mean 'valid/"),
        (["log", "--by", "valid/nothing"], "--by: which value is better? write --by min:valid/nothing"),
    ):
        done = emrun_here("report", *arguments)
        assert done.returncode == 2, arguments
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    (tmp_path / "file").write_text("")
    assert emrun_here("report", "log", "-o", "file/x.html").returncode == 74


def test_a_killed_run_and_one_without_an_epoch(make_run, emrun_here, tmp_path):
    make_run("killed", [0.5, 0.6], status="killed")
    make_run("early", [], status="failed")
    for name, said in (("killed", "✕ killed"), ("early", "There is nothing to draw")):
        assert emrun_here("report", f"log/{name}").returncode == 0
        assert said in page(tmp_path / "log" / name / "report.html").text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_draws_the_curves_without_an_error_or_a_request(trained, tmp_path):
    url = f"file://{trained / 'run' / 'report.html'}"
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    done = subprocess.run(
        ["chromium", *flags.split(), "--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=5000", "--dump-dom", url],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    charts = len(page(trained / "run" / "report.html").data["charts"])
    assert 1 <= done.stdout.count("<canvas") <= charts


def test_a_page_that_a_kill_has_prevented_is_written_by_the_next_resume(trained, emrun_here, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)
    path = tmp_path / "run" / "report.html"
    path.unlink()
    (tmp_path / "run" / ".report.html.tmp").write_text("<!DOC")
    done = emrun_here("resume", "run")
    assert (done.returncode, "nothing to do" in done.stderr) == (0, True)
    assert "finished" in page(path).text
    assert not (tmp_path / "run" / ".report.html.tmp").exists()
    written = path.stat().st_mtime_ns
    assert emrun_here("resume", "run").returncode == 0
    assert path.stat().st_mtime_ns == written


def test_the_time_of_an_epoch_is_without_the_evaluation_before_the_first_one(make_run, emrun_here, tmp_path):
    run = make_run("a", [0.5, 0.6, 0.7]).directory
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    for line, seconds in zip(lines, (50, 10, 20), strict=True):
        line["seconds"] = seconds
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert emrun_here("report", "log/a", "-o", "a.html").returncode == 0
    found = page(tmp_path / "a.html")
    assert re.search(r"in epochs\s*1\.3 min\s*an epoch\s*15 s", found.text)
    assert found.data["runs"][0]["seconds"] == [50, 60, 80]


def luminance(color):
    """Return the relative luminance of a color such as `#0060a8`, as WCAG 2 defines it."""
    parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted(luminance(each) for each in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_colors_have_enough_contrast_in_light_and_in_dark():
    style = (ROOT / "emrun" / "runs" / "report" / "page.css").read_text()
    themes = [
        dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in re.findall(r"\{\s*(--paper.*?)\}", style, re.S)
    ]
    assert len(themes) == 2
    for theme in themes:
        for name in ("ink", "soft", "link", "good", "bad", "wait"):
            assert contrast(theme[name], theme["paper"]) >= 4.5, name
            assert contrast(theme[name], theme["raised"]) >= 4.5, name
        for name in (f"c{index}" for index in range(6)):
            assert contrast(theme[name], theme["paper"]) >= 3, name


def test_a_screen_reader_has_a_name_for_everything(trained, emrun_here, tmp_path):
    for index in range(2):
        shutil.copytree(trained / "run", tmp_path / "log" / f"run-{index}", symlinks=True)
    assert emrun_here("report", "log").returncode == 0
    for path in (trained / "run" / "report.html", tmp_path / "log" / "report.html"):
        text, found = path.read_text(), page(path)
        tags = [(name, attributes) for name, attributes in found.tags if name not in ("script", "style")]
        ids = [attributes["id"] for _, attributes in tags if attributes.get("id")]
        assert len(ids) == len(set(ids))
        assert ("html", {"lang": "en"}) in tags
        assert [name for name, _ in tags].count("main") == [name for name, _ in tags].count("h1") == 1
        assert text.count("<table") == text.count("<caption") == text.count("<thead")
        for name, attributes in tags:
            if name == "th":
                assert attributes["scope"] in ("row", "col")
            if name == "img":
                assert attributes["alt"]
            if attributes.get("role") in ("img", "group"):
                assert attributes["aria-label"]
            if "tabindex" in attributes:
                assert attributes["tabindex"] == "0"
        assert not re.search(r"<th[^>]*></th>", text)
        for each in re.findall(r"<(?:input|select)[^>]*>", text):  # each is in a label
            before = text[: text.index(each)]
            assert before.count("<label>") == before.count("</label>") + 1


def test_a_page_that_is_followed_reloads_itself_until_the_run_ends(make_run, tmp_path, monkeypatch):
    run = make_run("a", (0.1,), status="running")
    pages = []

    def pause(seconds):
        pages.append((tmp_path / "page.html").read_text())
        run.end("finished", 0, None, 0, 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("emrun.runs.finding.sleep", pause)
    assert group.main(["report", "log/a", "--follow", "-o", "page.html"], standalone_mode=False) == 0
    pages.append((tmp_path / "page.html").read_text())
    assert ['http-equiv="refresh"' in page for page in pages] == [True, False]


REPORTS = """
from emrun import AbstractHook
from emrun.cli import emrun


class Reports(AbstractHook):
    def __init__(self, mode=None, output_dir=None):
        super().__init__(output_dir=output_dir)
        self.mode = mode

    def after_epoch(self, epoch_id):
        page = self.output_dir / "report.html"
        if epoch_id == 1:
            assert emrun.main(["report", str(self.output_dir)], standalone_mode=False) == 0
            assert not page.with_name(".report.html.tmp").exists()
        if epoch_id == 1 and self.mode == "other":
            page.write_text("<p>not of emrun")
"""


@pytest.mark.parametrize("mode", thinned(["made", "other"], ["other"]))
def test_a_page_that_is_made_during_the_run_is_replaced_by_that_of_the_run(trained, emrun_here, tmp_path, mode):
    config = (
        (trained / "config.yaml").read_text().replace("hooks:", f"hooks:\n  - reports.Reports: {{mode: {mode}}}", 1)
    )
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "reports.py").write_text(REPORTS)
    done = emrun_here("train", "config.yaml", "--no-progress", "--output-dir", "run")
    assert done.returncode == 0, done.stderr
    is_own = mode != "other"
    assert ("page: run/report.html" in done.stdout + done.stderr) == is_own
    assert ("report.html was not written: UsageError: " in done.stderr) != is_own
    if is_own:
        assert "✓ finished" in page(tmp_path / "run" / "report.html").text
