"""Writes a graph of families: who is whose wife or husband, parent, child, sibling, grandparent, uncle or aunt."""

import itertools
import random
from pathlib import Path

rng = random.Random(0)
triples = set()
for family in range(30):
    names = (f"person_{family}_{number}" for number in itertools.count())
    couples = [(next(names), next(names)) for _ in range(1 + rng.randint(2, 3))]
    grandparents, *parents = couples
    children = {couple: [next(names) for _ in range(rng.randint(2, 3))] for couple in parents}
    triples |= {(a, "married_to", b) for couple in couples for a, b in (couple, couple[::-1])}
    for couple, those in {grandparents: [first for first, _ in parents], **children}.items():
        triples |= {(parent, "parent_of", child) for parent in couple for child in those}
        triples |= {(child, "child_of", parent) for parent in couple for child in those}
        triples |= {(a, "sibling_of", b) for a in those for b in those if a != b}
    for couple, those in children.items():
        triples |= {(old, "grandparent_of", child) for old in grandparents for child in those}
        triples |= {(a, "uncle_or_aunt_of", child) for a, _ in parents if a != couple[0] for child in those}

train = sorted(triples)
rng.shuffle(train)
parts = {"valid": train[:250], "test": train[250:500], "train": train[500:]}
known = {each for subject, _, object in parts["train"] for each in (subject, object)}
Path("data").mkdir(exist_ok=True)
for name, those in parts.items():
    kept = ["\t".join(each) for each in those if {each[0], each[2]} <= known]
    Path(f"data/{name}.tsv").write_text("\n".join(kept) + "\n", encoding="utf-8")
