"""Experiments of a night: propose a change, train it for a while, and keep it if it is better on several seeds.

    python night.py EXPERIMENTS MINUTES

MINUTES are those of training of each run. Every command prints one JSON object; the last line here is the result.
"""

import json
import random
import subprocess
import sys

CHANGES = {
    "model.optimizer.lr": ["3.0e-4", "3.0e-3", "1.0e-2"],
    "model.optimizer.weight_decay": ["0.0", "0.1"],
    "vars.hidden": ["32", "128"],
    "model.scheduler": ["{class: Cosine, warmup: 5%}", "{class: Constant, cooldown: 20%}"],
}


def emrun(*arguments):
    """Run a command; return its object."""
    done = subprocess.run(["emrun", *arguments, "--json"], stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout)


def repaired(overrides, emrun):
    """Return overrides that the check accepts, None if it proposes no way to get there."""
    for _ in range(5):
        problems = emrun("check", "config.yaml", *overrides, "--static")["problems"]
        if not problems:
            return overrides
        overrides = [*overrides, *((problems[0]["fix"] or {}).get("overrides") or ())]
    return None


def night(experiments, minutes, emrun=emrun, pairs="3..8", seed=0):
    """Run experiments; return the changes that were kept and a line about each experiment."""
    draw, kept, lines = random.Random(seed), [], []
    budget = ["~hooks.StopAfter.epochs", f"hooks.StopAfter.training_minutes={minutes}"]
    for number in range(experiments):
        key = draw.choice(list(CHANGES))
        change = repaired([f"{key}={draw.choice(CHANGES[key])}"], emrun)
        if change is None:
            continue
        run = emrun("train", "config.yaml", *budget, *kept, *change, "-q")
        while run["status"] == "failed" and run["problems"][0]["retry"]:
            run = emrun("train", "config.yaml", *budget, *kept, *change, "-q")
        verdict = run["problems"][0]["code"] if run["status"] == "failed" else "equal"
        if run["status"] == "finished":
            changes = [word for each in change for word in ("-b", each)]
            found = emrun("compare", "config.yaml", *budget, *kept, *changes, "--pairs", pairs, "-q")
            verdict = found.get("verdict", "failed")
        kept += change if verdict == "b" else []
        lines.append({"experiment": number + 1, "change": change, "verdict": verdict, "best": run.get("best")})
    return {"kept": kept, "experiments": lines}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(night(int(sys.argv[1]), float(sys.argv[2]))) + "\n")
