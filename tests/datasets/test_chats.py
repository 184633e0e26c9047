"""Chats: the tokens of answers, with templates that mark them and others; packs; and training on both, exactly."""

import csv
import importlib.util
import json
import multiprocessing
import os
import random
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from campaign import thinned
from doubles import stream_of
from in_ranks import in_ranks
from safetensors.torch import load_file
from training.resuming import Interrupt, resumed, train_with
from words import MARKED, PLAIN, WORDS, save_tokenizer

from emrun import AbstractHook, Factory, TorchModel, create_training, predict, resume_training
from emrun.base.errors import ArgumentError, UsageError
from emrun.datasets import Chats, Mixed
from emrun.losses import next_token, trained_tokens
from emrun.models.step.packs import check_packs
from emrun.ranks.group import Ranks
from emrun.ranks.shares import rows_in

if importlib.util.find_spec("transformers") is None:  # not imported here: that takes seconds
    pytest.skip("transformers is not installed", allow_module_level=True)

RANDOM = random.Random(0)


def chat(*contents):
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": role, "content": each} for role, each in zip(roles, contents, strict=False)]}


def said():
    return " ".join(RANDOM.choices(WORDS, k=RANDOM.randint(1, 6)))


ROWS = [chat(*(said() for _ in range(2 * RANDOM.randint(1, 2)))) for _ in range(40)]
CHANGING = PLAIN.replace("m.content + ' <end>'", "m.content + (' <end>' if loop.last else ' <more>')")
SPACED = MARKED.replace("' <end>' }}{% endgeneration %}", "' <end> ' }}{% endgeneration %}")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    place = tmp_path_factory.mktemp("tokenizers")
    templates = {"marked": MARKED, "plain": PLAIN, "changing": CHANGING, "spaced": SPACED, "none": None}
    templates["raising"] = "{{ raise_exception('not this') }}"
    return {name: save_tokenizer(place / name, template, ends=False) for name, template in templates.items()}


@pytest.fixture
def chats(tmp_path, monkeypatch, tokenizers):
    monkeypatch.chdir(tmp_path)

    def make(rows=ROWS, tokenizer="plain", **arguments):
        content = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "chats.jsonl").write_text(content)
        tokenizer = tokenizers.get(tokenizer, tokenizer) if isinstance(tokenizer, str) else tokenizer
        return Chats("chats.jsonl", **{"tokenizer": tokenizer, "batch_size": 8, **arguments})

    return make


def read(dataset, name="train", training=False, **options):
    with stream_of(dataset, name, training=training, **options) as stream:
        return list(stream)


def test_answers_are_trained_whether_the_template_marks_them_or_not(chats, bits, tokenizers):
    from transformers import AutoTokenizer

    raw = AutoTokenizer.from_pretrained(tokenizers["marked"])
    batches = read(chats(tokenizer="marked"))
    assert bits(batches) == bits(read(chats(tokenizer="plain"))) == bits(read(chats(tokenizer="spaced")))
    found = [
        labels[mask == 1].tolist()
        for batch in batches
        for labels, mask in zip(batch["labels"], batch["attention_mask"], strict=True)
    ]
    for row, labels in zip(ROWS, found, strict=True):
        theirs = raw.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        pairs = zip(theirs["input_ids"], theirs["assistant_masks"], strict=True)
        assert labels == [token if is_trained else -100 for token, is_trained in pairs]

    whole = read(chats(train_on="all"))[0]
    expected = np.where(whole["attention_mask"] == 1, whole["input_ids"], -100)
    expected[:, 0] = -100
    assert np.array_equal(whole["labels"], expected)


def test_a_template_that_changes_what_came_before_is_an_error_that_shows_both(chats):
    with pytest.raises(
        ArgumentError, match=r"line 1: .*the template changes .*<end> <assistant> ' becomes .*<more> .*'"
    ) as caught:
        chats([chat("w1", "w2", "w3", "w4")], "changing")
    assert "{% generation %}" in str(caught.value)
    assert len(read(chats([chat("w1", "w2", "w3", "w4")], "changing", train_on="all"))) == 1


def test_packs_have_all_chats_once_begin_anew_with_each_and_come_in_a_fixed_number(chats):
    dataset = chats(pack=40, batch_size=3)
    alone = {
        tuple(b["input_ids"][i][b["attention_mask"][i] == 1]) for b in read(chats()) for i in range(len(b["labels"]))
    }
    orders = []
    with stream_of(dataset, "train") as stream:
        for _ in range(3):
            batches = list(stream)
            assert len(batches) == dataset.num_batches["train"]
            assert all(set(batch) == {"input_ids", "position_ids", "labels"} for batch in batches)
            packs = [pack for batch in batches for pack in zip(*(batch[name] for name in batch), strict=True)]
            found = []
            for tokens, positions, labels in packs:
                assert len(tokens) <= 40
                assert (labels[positions == 0] == -100).all()
                found += [tuple(each) for each in np.split(tokens, np.flatnonzero(positions == 0)[1:])]
            orders.append([each for each in found if any(each)])  # without padding, whose token is 0
            assert set(orders[-1]) == alone and len(orders[-1]) == len(ROWS)
    assert orders[0] != orders[1] != orders[2]
    fewest = -(-sum(map(len, orders[0])) // 40)
    assert len(packs) <= fewest + 1
    for training in (True, False):
        whole = read(dataset, training=training)
        shares = [read(dataset, training=training, ranks=Ranks(rank, 2)) for rank in range(2)]
        for batch, *own in zip(whole, *shares, strict=True):
            rows = [row[row > 0].tolist() for each in own for row in each["input_ids"][: rows_in(each)]]
            assert rows == [row[row > 0].tolist() for row in batch["input_ids"]]


def test_packs_are_the_same_however_they_are_read_and_resumed(chats, check_training_stream):
    check_training_stream(lambda: chats(pack=40, batch_size=2), stops=(3,))


def test_chats_that_are_cut_or_have_no_answer_are_counted_and_left_out(chats, caplog):
    rows = [chat("w1", "w2 w3 w4 w5 w6"), chat("w1 w2 w3 w4 w5 w6 w7 w8", "w2"), chat("w1"), chat("w1", "w2")]
    with caplog.at_level("INFO"):
        dataset = chats(rows, length=8)
    assert "train: 4 rows, 25 tokens; 2 had more than 8 tokens and are cut; 2 have no trained token" in caplog.text
    (batch,) = read(dataset)
    assert batch["labels"].tolist() == [[-100] * 4 + [10, 11, 12, 13], [-100] * 4 + [10, 4] + [-100] * 2]


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        ([chat("a"), {"messages": [{"content": "a"}]}], {}, "'chats.jsonl', line 2: .*message 1 has no 'role', but"),
        ([chat("a"), {"messages": [{"from": "gpt", "value": "a"}]}], {}, "line 2: .* no 'role', but from, value"),
        ([chat("a", "b"), {"conversations": []}], {}, "line 2: column 'messages': is missing"),
        ([{"messages": [{"role": "user", "content": [{"type": "text"}]}]}], {}, "line 1: .*of message 1 is a list"),
        ([{"messages": "hello"}], {}, "line 1: .*write a list of messages as JSON"),
        ([{"messages": []}], {}, r"line 1: .*'\[\]' is not a list of messages"),
        ('{"messages": [{"role": "us', {}, r"'chats.jsonl', line 1: Unterminated.*is the line cut\?"),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], {}, "line 1: .*it begins with an answer"),
        ([{"messages": [{"role": "bot", "content": "a"}]}], {}, "no row has a trained token; .*the roles bot"),
        ([chat("w1", "w2")], {"tokenizer": "raising"}, "line 1: .*the chat template refuses the chat: not this"),
        (ROWS, {"tokenizer": "none"}, "has no chat template; write {name: NAME, template: FILE}"),
        (ROWS, {"pack": 10, "length": 11}, "length: 11 tokens do not fit into a pack of 10"),
        (ROWS, {"pack": 10, "buckets": True}, "pack: packs have little padding"),
        (ROWS, {"train_on": "user"}, "train_on: 'user' is not one of assistant, all"),
    ],
)  # fmt: skip
def test_bad_input_is_one_error_with_file_and_line(chats, rows, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        chats(rows, **arguments)


def test_each_format_has_the_same_chats(chats, bits, tmp_path, tokenizers):
    expected = bits(read(chats()))
    pq.write_table(pa.Table.from_pylist([{**row, "more": number} for number, row in enumerate(ROWS)]), "a.parquet")
    with Path("a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], *([json.dumps(row["messages"])] for row in ROWS)])
    for name in ("a.parquet", "a.csv"):
        assert bits(read(Chats(name, tokenizer=tokenizers["marked"], batch_size=8))) == expected


def test_a_template_of_a_file_takes_the_place_of_none(chats, bits, tokenizers, tmp_path):
    (tmp_path / "chat.jinja").write_text(MARKED)
    form = {"name": tokenizers["none"], "template": str(tmp_path / "chat.jinja")}
    assert bits(read(chats(tokenizer=form))) == bits(read(chats()))


# training


def config(kind="GPTNeoX", pack=None, use_cache=False, batch_size=None, loop=(), **model):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    own = {"class": f"transformers.{kind}Config", "vocab_size": 60, "intermediate_size": 64, "use_cache": use_cache}
    own["dtype"] = "float64"  # in which Llama calculates only a part
    size = batch_size or (8 if pack is None else 2)
    return {
        "seed": 1,
        "dataset": {
            "class": "Chats", "train": "chats.jsonl", "tokenizer": "tokenizer", "split": {"valid": 0.25},
            "batch_size": size, "pack": pack,
        },
        "model": {
            "module": {"class": "transformers.AutoModelForCausalLM.from_config", "config": {**own, **sizes}},
            "inputs": ["input_ids", "attention_mask" if pack is None else "position_ids"],
            "outputs": ["logits"],
            "loss": {"import": "emrun.losses.next_token", "inputs": ["logits", "labels"]},
            "optimizer": {"class": "SGD", "lr": 0.1},
            **model,
        },
        "main_loop": {"extra_streams": ["valid"], "report": False, "skip_zeroth_epoch": True, **dict(loop)},
        "hooks": ["ComputeStats", {"StopAfter": {"epochs": 1}}],
    }  # fmt: skip


@pytest.fixture
def project(chats, tmp_path, tokenizers):
    """Write the chats and a tokenizer where `config` finds them."""
    chats()
    (tmp_path / "tokenizer").symlink_to(tokenizers["plain"])
    return tmp_path


def trained(name, at=None, **arguments):
    """Train, and resume if it is interrupted at an event; return the losses of each epoch and the weights."""
    train_with(create_training(config(**arguments), output_dir=name), Interrupt(at))
    if at is not None:
        resumed(name)
    rows = [json.loads(line)["streams"] for line in (Path(name) / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 1
    losses = [row[stream]["loss"]["mean"] for row in rows for stream in ("train", "valid") if stream in row]
    weights = load_file(f"{name}/checkpoints/latest/model.safetensors")
    return [*losses, *(float(each.double().sum()) for each in weights.values())]


@pytest.mark.campaign
def test_a_run_that_is_interrupted_in_an_epoch_ends_the_same_with_workers(project):
    expected = trained("straight", pack=40)
    assert trained("resumed", at=7, pack=40, loop={"workers": 2}) == expected


@pytest.mark.campaign  # see the tests of packs: their shares on ranks, and how they are resumed
def test_a_run_that_is_interrupted_in_an_epoch_ends_the_same_on_two_ranks(project):
    expected = trained("straight", pack=40)
    found = in_ranks(2, trained, "ranks", at=7, pack=40)[0]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


class Dies(AbstractHook):
    """Ends the process at once, as a lack of memory does."""

    def after_batch(self, stream_name):
        if self.main_loop.iterations_done == 7:
            os.kill(os.getpid(), signal.SIGKILL)


def dies(name):
    training = create_training("c.yaml", output_dir=name)
    training.main_loop.change_hooks([*training.main_loop.hooks, Dies()])
    training.main_loop.run_training()


@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "workers"), [("chat", 1), ("text_classification", 0)])
def test_a_run_of_a_base_that_is_killed_ends_with_the_same_bits(project, kind, workers):
    rows = [{"text": said(), "label": "ab"[row % 2]} for row in range(40)]
    (project / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file, more = ("chats", {"pack": 40, "layers": 1}) if kind == "chat" else ("texts", {})
    values = {"train": f"{file}.jsonl", "tokenizer": {"learn": 300}, "width": 32, "epochs": 1, "batch_size": 2, **more}
    own = {
        "extends": f"emrun:{kind}",
        "seed": 1,
        "vars": values,
        "main_loop": {"workers": workers, "report": False, "skip_zeroth_epoch": True},
        "hooks": {"SaveEvery": {"every": "3 iterations"}},
    }
    (project / "c.yaml").write_text(json.dumps(own))
    expected = finished(create_training("c.yaml", output_dir="straight"), "straight")
    child = multiprocessing.get_context("fork").Process(target=dies, args=("killed",))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert finished(resume_training("killed"), "killed") == expected


def finished(training, name):
    """Train to the end; return the weights of the run."""
    assert training.main_loop.run_training().status == "finished"
    return Path(name, "checkpoints", "latest", "model.safetensors").read_bytes()


def test_parts_of_a_batch_weigh_as_many_tokens_as_they_train(project, chats):
    chats(ROWS[:16])
    expected = trained("whole")
    for name, arguments in {
        "accumulated": {"accumulate": 4, "batch_size": 2},
        "parts": {"micro_batch_size": 3},
    }.items():
        assert trained(name, **arguments) == pytest.approx(expected, rel=1e-9, abs=1e-9), name


def test_the_loss_and_its_gradients_are_those_of_transformers(chats):
    model = model_of("Llama")
    for batch in read(chats()):
        tensors = {name: torch.from_numpy(each) for name, each in batch.items()}
        labels = tensors["labels"]
        theirs = model(**tensors)
        theirs.loss.backward()
        expected = {name: each.grad.clone() for name, each in model.named_parameters()}
        model.zero_grad()
        weights = trained_tokens(labels)
        logits = model(input_ids=tensors["input_ids"], attention_mask=tensors["attention_mask"]).logits
        loss = (next_token(logits, labels) * weights).sum() / weights.sum()
        loss.backward()
        assert float(loss.detach()) == pytest.approx(float(theirs.loss.detach()), rel=1e-6)
        for name, each in model.named_parameters():
            assert torch.allclose(each.grad, expected[name], atol=1e-6), name
        model.zero_grad()


LOSS = Factory(next_token, is_import=True, options={"inputs": ["logits", "labels"]})


def model_of(kind, **more):
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    own = getattr(transformers, f"{kind}Config")(**{"vocab_size": 60, "intermediate_size": 64, **sizes, **more})
    own.bos_token_id = own.eos_token_id = None
    return transformers.AutoModelForCausalLM.from_config(own)


KINDS = [("Llama", "eager"), ("Llama", "sdpa"), ("Qwen2", "sdpa"), ("GPT2", "eager"), ("GPTNeoX", "sdpa")]


@pytest.mark.parametrize(("kind", "attention"), thinned(KINDS, [("Llama", "sdpa"), ("GPT2", "eager")]))
def test_chats_in_packs_have_the_loss_of_chats_alone_and_a_cache_is_found(chats, kind, attention):
    def mean_loss(dataset, names, **more):
        model = TorchModel(
            model_of(kind, attn_implementation=attention, **more),
            inputs=names,
            outputs=["logits"],
            loss=LOSS,
        )
        total = weight = 0.0
        for batch in read(dataset):
            outputs = model.run(batch, train=False, stream="train")
            total += float((outputs["loss"] * outputs["example_weight"]).sum())
            weight += float(outputs["example_weight"].sum())
        tensors = {name: torch.from_numpy(each) for name, each in batch.items()}
        return total / weight, model, tensors

    packed = chats(pack=40, batch_size=3)
    names = ["input_ids", "position_ids"]
    loss, model, tensors = mean_loss(packed, names, use_cache=False)
    assert loss == pytest.approx(mean_loss(chats(), ["input_ids", "attention_mask"])[0], abs=1e-5)
    check_packs(model.module, model._forward, tensors, 32)
    _, model, tensors = mean_loss(packed, names)
    with pytest.raises(ArgumentError, match=r"see each other: 'logits' .* differs .*set `use_cache: false`"):
        check_packs(model.module, model._forward, tensors, 32)


def test_packs_are_checked_before_the_first_update(project):
    with pytest.raises(ArgumentError, match="use_cache: false"):
        trained("cached", pack=40, use_cache=True)
    assert not Path("cached", "checkpoints", "it-00000001").exists()
    with pytest.raises(ArgumentError, match="inputs: `pack` needs a module that gets the source 'position_ids'"):
        trained("blind", pack=40, inputs=["input_ids"], loop={"on_unused_sources": "ignore"})


@pytest.mark.parametrize("pack", thinned([None, 64], [64]))
def test_answers_are_generated_beside_those_of_the_data_and_of_chats_that_wait_for_them(chats, pack, tmp_path):
    pairs = [("say 1", "yes"), ("say 2", "no")] * 40
    chats([chat(*first, *second) for first, second in zip(pairs, sorted(pairs), strict=True)])
    made = config(pack=pack, batch_size=2)
    made["dataset"] |= {"tokenizer": {"learn": 270}, "split": {"valid": 0.2}}
    own = {"class": "emrun.models.networks.chat_model", "tokens": "${data:embeddings.input_ids}", "width": 32}
    made["model"] |= {"module": {**own, "layers": 1}, "optimizer": {"class": "AdamW", "lr": 0.01}}
    made["hooks"][1] = {"StopAfter": {"epochs": 2}}
    create_training(made, output_dir="run").main_loop.run_training()
    done = predict("run", "valid", "a.jsonl", generate=5)
    assert (done.rows, done.columns) == (5, ("position", "prompt", "answer", "generated"))
    rows = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["prompt"].endswith("<begin>assistant\n")
        assert row["prompt"].count("<begin>assistant\n") == 2
        assert row["generated"] == row["answer"]
    assert {row["answer"] for row in rows} == {"yes", "no"}
    # another time, the same; new chats, without the others
    (tmp_path / "new.jsonl").write_text(json.dumps(chat("say 1", "yes", "say 2")) + "\n" + json.dumps(ROWS[0]))
    (tmp_path / "chats.jsonl").unlink()
    for name in ("b.jsonl", "c.jsonl"):
        assert predict("run", file=name, data="new.jsonl", generate=9).rows == 2
    assert Path("b.jsonl").read_bytes() == Path("c.jsonl").read_bytes()
    first, second = map(json.loads, Path("b.jsonl").read_text().splitlines())
    assert (first["answer"], first["generated"]) == ("", "no")
    assert second["answer"] == ROWS[0]["messages"][-1]["content"]
    with pytest.raises(UsageError, match="generate: needs a file and one process"):
        predict("run", data="new.jsonl", generate=2)


def test_mixed_chats_are_checked_as_those_of_one_dataset(chats):
    mixed = Mixed({"a": chats(pack=40), "b": chats(pack=40)}, {"a": 1, "b": 1}, batches_per_epoch=3)
    assert mixed.is_packed and not Mixed({"a": chats()}, {"a": 1}, batches_per_epoch=3).is_packed
    with pytest.raises(ArgumentError, match="'w49' has the number 57"):
        mixed.check_vocabulary(57)
    other = chats(tokenizer={"learn": 300})
    with pytest.raises(ArgumentError, match="datasets: they have different tokenizers"):
        Mixed({"a": chats(), "b": other}, {"a": 1, "b": 1}, batches_per_epoch=3).check_vocabulary(999)
    again = chats(tokenizer={"learn": 300})
    Mixed({"a": again, "b": other}, {"a": 1, "b": 1}, batches_per_epoch=3).check_vocabulary(999)


def test_a_vocabulary_larger_than_that_of_the_model_is_an_error_with_the_line(project):
    own = config()
    own["model"]["module"]["config"]["vocab_size"] = 50
    with pytest.raises(Exception, match=r"line \d+: the token 'w49' has the number 57, .* has 50 tokens"):
        create_training(own, output_dir="run").main_loop.run_training()
