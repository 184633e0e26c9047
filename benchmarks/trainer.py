"""Compare the training of a language model on chats with that by `transformers.Trainer`, on the same batches.

    python benchmarks/trainer.py [--pairs 5] [--passes 3] [--hidden 256]

The sample `chat` packs the chats. emrun reads them as its config says; Trainer gets the batches of the first pass, made
before, from a list. Model, weights at the beginning, optimizer and number of updates are the same. Each
training has a process of its own with one thread; the two alternate. Seconds are those between the update `SKIPPED` and
the last one, of the train stream alone. Printed are the loss of the first update, which must be the same, the seconds,
and the median of the ratios of the pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).parent.parent
SKIPPED = 5  # updates


def overrides(hidden: int, passes: int) -> list[str]:
    """Return the overrides of the sample: a larger model, no evaluations, nothing that is saved."""
    config = "model.module.config"
    return [
        *(f"{config}.{key}={value}" for key, value in (("hidden_size", hidden), ("intermediate_size", 2 * hidden))),
        "main_loop={skip_zeroth_epoch: true}",
        f"hooks=[ComputeStats, {{StopAfter: {{epochs: {passes}}}}}]",
    ]


def by_emrun(place: Path, changes: Sequence[str], batches: Path | None) -> dict[str, Any]:
    """Train by emrun; write the batches of the first pass, if a file is given."""
    import torch

    from emrun import AbstractHook, create_training

    class Clock(AbstractHook):
        """Keeps when each update was made, and the first loss."""

        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []
            self.losses: list[float] = []
            self.batches: list[dict[str, torch.Tensor]] = []

        def after_batch(self, stream_name: str, batch_data: dict[str, Any]) -> None:
            """Look at the clock."""
            self.times.append(perf_counter())
            if len(self.times) == 1:
                self.losses.append(float(batch_data["loss"].mean()))
            if batches is not None and self.main_loop.training_epochs_done == 0:
                names = ("input_ids", "position_ids", "labels")
                self.batches.append({name: torch.as_tensor(batch_data[name]) for name in names})

    os.chdir(place)
    torch.set_num_threads(1)
    training = create_training("config.yaml", output_dir=tempfile.mkdtemp(dir=place) + "/run", overrides=changes)
    clock = Clock()
    loop = training.main_loop
    loop.change_hooks([*loop.hooks, clock])
    if batches is not None:
        torch.save(training.model.module.state_dict(), place / "weights.pt")
    loop.run_training()
    if batches is not None:
        torch.save(clock.batches, batches)
    return {"seconds": clock.times[-1] - clock.times[SKIPPED - 1], "updates": len(clock.times), "loss": clock.losses[0]}


def by_trainer(place: Path, hidden: int, passes: int, batches: Path) -> dict[str, Any]:
    """Train by `transformers.Trainer`."""
    import torch
    import transformers

    os.chdir(place)
    torch.set_num_threads(1)
    known = torch.load(batches)
    config = transformers.LlamaConfig(
        vocab_size=400, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=2,
        use_cache=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(torch.load(place / "weights.pt"))
    with torch.no_grad():
        loss = float(model(**known[0]).loss)
    times: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        """Keeps when each update was made."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(perf_counter())

    arguments = transformers.TrainingArguments(
        output_dir=str(place / "trainer"), num_train_epochs=passes, per_device_train_batch_size=1, learning_rate=3e-3,
        lr_scheduler_type="constant", max_grad_norm=0.0, weight_decay=0.01, optim="adamw_torch", use_cpu=True,
        save_strategy="no", eval_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=known, data_collator=lambda rows: rows[0], callbacks=[Clock()]
    )
    trainer.train()
    return {"seconds": times[-1] - times[SKIPPED - 1], "updates": len(times), "loss": loss}


def main() -> None:
    """Train in pairs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        batches = arguments.place / "batches.pt"
        if arguments.only == "trainer":
            found = by_trainer(arguments.place, arguments.hidden, arguments.passes, batches)
        else:
            kept = batches if arguments.only == "first" else None
            found = by_emrun(arguments.place, overrides(arguments.hidden, arguments.passes), kept)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "config.yaml").write_bytes((ROOT / "sample_configs" / "chat" / "config.yaml").read_bytes())
        subprocess.run([sys.executable, str(ROOT / "sample_configs" / "chat" / "prepare.py")], cwd=place, check=True)

        def train(kind: str) -> dict[str, Any]:
            words = ["--only", kind, "--place", folder, "--passes", str(arguments.passes)]
            command = [sys.executable, __file__, *words, "--hidden", str(arguments.hidden)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]

        train("first")
        ratios = []
        print("| pair | emrun, s | Trainer, s | ratio | updates | first losses |\n|---|---|---|---|---|---|")
        for pair in range(arguments.pairs):
            kinds = ("emrun", "trainer") if pair % 2 == 0 else ("trainer", "emrun")
            found = {kind: train(kind) for kind in kinds}
            ours, theirs = found["emrun"], found["trainer"]
            ratios.append(ours["seconds"] / theirs["seconds"])
            updates = f"{ours['updates']}, {theirs['updates']}"
            losses = f"{ours['loss']:.6f}, {theirs['loss']:.6f}"
            seconds = f"{ours['seconds']:.3f} | {theirs['seconds']:.3f} | {ratios[-1]:.3f}"
            print(f"| {pair + 1} | {seconds} | {updates} | {losses} |", flush=True)
    print(f"\nthe median of the ratios: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
