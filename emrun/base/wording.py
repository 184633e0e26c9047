"""Parts of messages: suggestions for a wrong name, lists of names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

IN_TABLE = 40
"""The most characters of a list of names in a table; see `few`."""
NO_OPTIMIZER = "training needs an optimizer, e.g. {class: AdamW, lr: 1.0e-3}"


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean 'epochs'?` for the name nearest to `name`, or an empty string if no name is near.

    The nearest name is the first that is found of: a name with almost the same letters, another common word for the
    same thing (`learning_rate`, `lr`), the only name that begins like this (`acc`), a name with similar letters.
    """
    near = nearest(name, allowed)
    return f"; did you mean {near!r}?" if near is not None else ""


def meant_of(name: object, names: Iterable[str]) -> str:
    """Return `; did you mean 'valid'? (it has train, valid)`: the nearest name, if any, and all names."""
    names = list(names)
    return f"{did_you_mean(str(name), names)} (it has {listed(names)})"


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the name nearest to `name`, None if no name is near; see `did_you_mean`."""
    match = sure(name, allowed := list(allowed))
    word = normalised(name)
    begins = [(normalised(candidate)[: len(word) + 1], candidate) for candidate in allowed if len(word) > 2]
    longer = [candidate for begin, candidate in begins if difflib.SequenceMatcher(None, begin, word).ratio() > 0.85]
    if match is None and len(longer) == 1:
        return longer[0]
    return match if match is not None else _most_alike(name, allowed, 0.6)


def sure(name: str, allowed: Iterable[str]) -> str | None:
    """Return the name that was almost surely meant: it has almost the same letters, or is a word for the same thing."""
    meant = _most_alike(name, allowed := list(allowed), 0.8)
    if meant is None:
        candidates = {normalised(candidate): candidate for candidate in allowed}
        meant = next((candidates[word] for word in same(name) if word in candidates), None)
    return meant


def same(name: str) -> list[str]:
    """Return the words that other tools use for the same thing, in lower case and without underscores."""
    return next((words.split() for words in _SAME if normalised(name) in words.split()), [])


def _most_alike(name: str, allowed: Iterable[str], cutoff: float) -> str | None:
    candidates = {normalised(candidate): candidate for candidate in allowed}
    word = normalised(name)
    near = difflib.get_close_matches(word, candidates, n=3, cutoff=cutoff)

    def likeness(other: str) -> tuple[float, bool]:
        return difflib.SequenceMatcher(None, other, word).ratio(), other[:1] == word[:1]

    return candidates[max(near, key=likeness)] if near else None


_SAME = (
    "lr learningrate stepsize alpha eta",
    "epochs nepochs maxepochs numepochs numtrainepochs epochscount",
    "iterations maxiterations steps maxsteps numsteps iters totalsteps numtrainsteps maxupdates",
    "minutes maxtime",
    "workers numworkers dataloadernumworkers nworkers",
    "buffer prefetchfactor prefetch",
    "device accelerator cuda gpu",
    "deterministic cudnndeterministic",
    "sgd momentum gradientdescent",
    "batchsize bs trainbatchsize perdevicetrainbatchsize",
    "weightdecay wd l2 decay",
    "p dropout dropoutrate rate prob",
    "hidden hiddensize hiddendim units width nunits",
    "infeatures inputsize inputdim nin",
    "outfeatures outputsize outputdim nout numclasses",
    "hooks callbacks",
    "mainloop trainer training loop",
    "dataset data dataloader datamodule",
    "model network net",
    "module network net backbone",
    "extrastreams validstreams evalstreams validation",
    "seed randomseed rngseed manualseed",
    "keep keeplast savetotallimit maxtokeep numbestcheckpointskept",
    "condition mode objective",
    "warmup warmupsteps numwarmupsteps warmupratio warmupepochs",
    "cooldown numdecaysteps decaysteps cooldownepochs",
    "final minlr minlrratio minlrrate etamin endlr lrend endfactor",
    "cycles numcycles",
    "variable monitor metric",
)


def listed(names: Sequence[str]) -> str:
    """Return names for a message: `a, b, c`, or `nothing`."""
    return ", ".join(names) if names else "nothing"


def few(names: Iterable[str], longest: int = 80) -> str:
    """Return the first names, as far as they fit, and how many more there are: `layers.0.weight, +37`, or `nothing`."""
    names = [in_one_line(name) for name in names]
    shown = list(names)
    while len(shown) > 1 and len(", ".join(shown)) > longest:
        shown.pop()
    if len(shown) < len(names):
        shown.append(f"+{len(names) - len(shown)}")
    return listed(shown)


def last_parts(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key for a heading; where two are equal, the whole key."""
    last = [key.rpartition(".")[2] for key in keys]
    return [part if last.count(part) == 1 else key for key, part in zip(keys, last, strict=True)]


def from_here(path: Path) -> Path:
    """Return a path for a message: relative to the current directory if it is below."""
    with suppress(OSError, ValueError):  # the current directory is gone, or elsewhere
        return path.relative_to(Path.cwd())
    return path


def counted(count: int, noun: str, ending: str = "s") -> str:
    """Return a count with its noun: `1 epoch`, `2 epochs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def duration(seconds: float) -> str:
    """Return a time for a message: `40 seconds`, `3 minutes`."""
    return counted(round(seconds / 60), "minute") if seconds >= 90 else counted(max(1, round(seconds)), "second")


def progress(epochs: int, iterations: int) -> str:
    """Return the progress of a run: `1 epoch, 20 iterations done`."""
    return f"{counted(epochs, 'epoch')}, {counted(iterations, 'iteration')} done"


def size_of(count: float) -> str:
    """Return a number of bytes as it is shown: `1.5 GB`."""
    thousands = min(3, (len(f"{count:.0f}") - 1) // 3)
    return f"{count / 1000**thousands:.3g} {('B', 'KB', 'MB', 'GB')[thousands]}"


def span(seconds: float) -> str:
    """Return a time for a table: `40 s`, `3.5 min`, `12 h`, `8 d`."""
    unit, length = next(((unit, length) for unit, length in _SPANS if abs(seconds) >= length), ("s", 1))
    return f"{seconds / length:.2g} {unit}" if abs(seconds) < 100 * length else f"{seconds / length:.0f} {unit}"


_SPANS = (("d", 86400), ("h", 3600), ("min", 60))


def in_one_line(text: str, longest: int = 300) -> str:
    """Return a text that may be anybody's for the terminal: on one line, without control characters, not too long."""
    plain = text if text.isprintable() else ascii(text)[1:-1]
    return plain if len(plain) <= longest else f"{plain[:longest]}..."


def normalised(name: str) -> str:
    """Return a name without regard to case and underscores, as short names and what was meant are compared."""
    return name.lower().replace("_", "")


def short(value: float) -> str:
    """Return a number with three digits: `0.00123`, `12.3`, `1235`."""
    return f"{value:.0f}" if 999.5 <= abs(value) < 1e7 else f"{value:.3g}"
