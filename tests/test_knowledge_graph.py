"""sample_configs/knowledge_graph: its statistics are those of a plain reference, and what files may be wrong about."""

import itertools
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from campaign import thinned
from samples import SAMPLES, own_modules

from emrun import MainLoop, create_dataset, create_hooks, create_model
from emrun.base.errors import ConfigError

SAMPLE = SAMPLES / "knowledge_graph"
MODELS = ("ComplEx", "DistMult", "TransE")
TYPES = ("KvsAll", "1vsAll", "negative_sampling")
SMALL = ["dataset.batch_size=16", "model.module.size=8", "model.scheduler=null", "hooks=[ComputeStats]"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a copy of the sample, in which this process is."""
    place = shutil.copytree(SAMPLE, tmp_path / "project", ignore=shutil.ignore_patterns("data"))
    monkeypatch.chdir(place)
    own_modules(place, monkeypatch)
    return place


def write(name, triples):
    Path("data").mkdir(exist_ok=True)
    Path(f"data/{name}.tsv").write_text("".join("\t".join(each) + "\n" for each in triples))


@pytest.fixture
def graph(project):
    """Return split -> its triples, of a graph of 12 entities, written into the project."""
    triples = [(f"e{a}", f"r{k}", f"e{(a * (k + 1) + k) % 12}") for a in range(12) for k in range(3)]
    triples += [("e1", "r0", f"e{each}") for each in (4, 5, 6)]  # several answers
    order = np.random.default_rng(0).permutation(len(triples))
    parts = {"train": [triples[each] for each in order[8:]], "valid": [triples[each] for each in order[:8]]}
    parts["test"] = parts["train"][:3]
    for name, those in parts.items():
        write(name, those)
    return parts


def built(overrides):
    parts = [make("config.yaml", [*SMALL, *overrides]) for make in (create_model, create_dataset, create_hooks)]
    return SimpleNamespace(model=parts[0], dataset=parts[1], loop=MainLoop(*parts))


def score(kind, subject, relation, obj):
    """Return the score of a triple from three embeddings, as the papers have it."""
    if kind == "TransE":
        return -np.abs(subject + relation - obj).sum()
    if kind == "DistMult":
        return (subject * relation * obj).sum()
    half = len(subject) // 2
    s, r, o = (each[:half] + 1j * each[half:] for each in (subject, relation, obj))
    return (s * r * np.conj(o)).sum().real


def ranks(kind, module, graph, *, reciprocal):
    """Return the filtered ranks of the valid triples, of objects and then of subjects, one triple after the other."""
    entities = sorted({each for s, _, o in graph["train"] for each in (s, o)})
    relations = sorted({r for _, r, _ in graph["train"]})
    e, r = (each.weight.detach().double().numpy() for each in (module.entities, module.relations))
    true = set(itertools.chain(*graph.values()))
    found = []
    for s, name, o in graph["valid"]:
        number = relations.index(name)
        tails, heads = [], []
        for index, each in enumerate(entities):
            if each == o or (s, name, each) not in true:
                tails.append((each, score(kind, e[entities.index(s)], r[number], e[index])))
            if each == s or (each, name, o) not in true:
                there = e[entities.index(o)]
                way = (there, r[number + len(relations)], e[index]) if reciprocal else (e[index], r[number], there)
                heads.append((each, score(kind, *way)))
        for those, answer in ((tails, o), (heads, s)):
            own = dict(those)[answer]
            found.append(1 + sum(value > own for _, value in those))  # no scores are equal
    return np.array(found)


FEW = [("ComplEx", "KvsAll"), ("DistMult", "negative_sampling"), ("TransE", "1vsAll")]


@pytest.mark.parametrize(("kind", "training"), thinned(itertools.product(MODELS, TYPES), FEW))
def test_filtered_ranks_are_those_of_a_plain_reference(kind, training, graph):
    reciprocal = (MODELS.index(kind) + TYPES.index(training)) % 2 == 0
    others = [f"dataset.type={training}", f"dataset.reciprocal={str(reciprocal).lower()}"]
    made = built([f"model.module.class=my_model.{kind}", *others])
    with made.loop as loop:
        loop.epoch(["train"])
        statistics = loop.epoch([], ["valid"])["valid"]
    expected = ranks(kind, made.model.module, graph, reciprocal=reciprocal)
    wanted = {"mrr": 1 / expected, "mean_rank": expected, "hits_1": expected <= 1, "hits_10": expected <= 10}
    for name, values in wanted.items():
        assert statistics[name]["mean"] == pytest.approx(np.mean(values), abs=1e-6)


def test_each_training_type_has_its_targets(graph):
    def batches(kind, more=()):
        dataset = built([f"dataset.type={kind}", "dataset.batch_size=1000", *more])
        return dataset.dataset, next(iter(dataset.loop.get_stream("train")))

    triples = sorted(graph["train"])
    dataset, batch = batches("1vsAll")
    assert len(batch["target"]) == 2 * len(triples)
    dataset, batch = batches("KvsAll")
    names, relations = sorted(dataset.entities), sorted({r for _, r, _ in triples})
    for entity, relation, target in zip(batch["entity"], batch["relation"], batch["target"], strict=True):
        name, number = names[entity], int(relation)
        if number < len(relations):
            answers = {o for s, r, o in triples if (s, r) == (name, relations[number])}
        else:
            answers = {s for s, r, o in triples if (o, r) == (name, relations[number - len(relations)])}
        assert target.tolist() == pytest.approx([(each in answers) / len(answers) for each in names])
    _, batch = batches("negative_sampling", ["dataset.negatives=5"])
    assert batch["candidates"].shape == (2 * len(triples), 6)
    assert not batch["target"].any()  # the answer is the first candidate


def test_negatives_are_drawn_uniformly_or_by_frequency(graph):
    triples = graph["train"]
    entities = sorted({each for s, _, o in triples for each in (s, o)})
    count = np.array([sum((s == each) + (o == each) for s, _, o in triples) for each in entities])
    for sampling, share in (("uniform", np.full(12, 1 / 12)), ("frequency", count / count.sum())):
        made = built(["dataset.type=negative_sampling", "dataset.negatives=2000", f"dataset.sampling={sampling}"])
        batch = next(iter(made.loop.get_stream("train")))
        drawn = np.bincount(batch["candidates"][:, 1:].ravel(), minlength=12) / batch["candidates"][:, 1:].size
        np.testing.assert_allclose(drawn, share, atol=0.01)


@pytest.mark.campaign  # tests/test_sample_configs.py trains the sample for a few batches
def test_complex_is_above_three_quarters_on_the_graph_of_families(project):
    runpy.run_path("prepare.py", run_name="__main__")
    parts = [make("config.yaml", ["hooks=[ComputeStats]"]) for make in (create_model, create_dataset, create_hooks)]
    with MainLoop(*parts) as loop:
        for _ in range(8):
            loop.epoch(["train"])
        assert loop.epoch([], ["valid"])["valid"]["mrr"]["mean"] > 0.75


@pytest.mark.parametrize(
    ("part", "line", "message"),
    [
        ("train", "a\tr", "data/train.tsv:2: ['a', 'r'] is not subject, relation and object"),
        ("train", "a\tr\tb\tc", "data/train.tsv:2: ['a', 'r', 'b', 'c'] is not"),
        ("valid", "a\t \tb", "data/valid.tsv:2: ['a', ' ', 'b'] is not"),
        ("valid", "a\tr\tstranger", "data/valid.tsv:2: 'stranger' is not in the train triples, data/train.tsv"),
        ("test", "a\tnear\tb", "data/test.tsv:2: 'near' is not in the train triples"),
        ("test", "\udcff", "data/test.tsv cannot be read: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_wrong_line_is_one_message_with_its_place(part, line, message, project):
    Path("data").mkdir()
    for name in ("train", "valid", "test"):
        text = "a\tr\tb\n" + (line + "\n") * (name == part)
        Path(f"data/{name}.tsv").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        create_dataset("config.yaml")
    assert message in str(caught.value)
    assert "config.yaml:" in str(caught.value)
