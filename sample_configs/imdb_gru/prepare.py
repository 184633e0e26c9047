"""Writes 1,200 reviews of films in the folders of the IMDB data: data/train/pos, data/train/neg, data/test/..."""

import random
from pathlib import Path

GOOD = ["great", "moving", "clever", "funny", "gripping", "beautiful", "charming", "brilliant"]
BAD = ["dull", "boring", "clumsy", "flat", "tedious", "ugly", "silly", "predictable"]
PARTS = ["plot", "cast", "ending", "music", "dialogue", "camera", "lead", "script"]
FORMS = ["The {part} is {word}.", "I found the {part} {word}!", "It has a {word} {part}."]
NOT = ["The {part} is not {word}.", "The {part} isn't {word} at all.", "Nobody would call the {part} {word}."]
FILLER = ["I saw it on a Sunday.", "It runs for 2 hours.", "My friends came along.", "We sat in the third row."]

random.seed(0)
for split, count in (("train", 500), ("test", 100)):
    for label, own, other in (("pos", GOOD, BAD), ("neg", BAD, GOOD)):
        folder = Path("data", split, label)
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            sentences = random.choices(FILLER, k=random.randint(0, 6))
            for form in (random.choice(FORMS), random.choice(NOT), random.choice(FORMS + NOT)):
                words = own if form in FORMS else other
                sentences.append(form.format(part=random.choice(PARTS), word=random.choice(words)))
            random.shuffle(sentences)
            (folder / f"{number}.txt").write_text(" ".join(sentences) + "\n", encoding="utf-8")
