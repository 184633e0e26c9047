"""Writes reviews.jsonl, and a tokenizer whose words are those of the reviews."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

random.seed(0)
THINGS = ["film", "book", "song", "dinner", "hotel", "trip"]
GOOD = ["lovely", "great", "warm", "clever"]
BAD = ["dull", "poor", "cold", "loud"]

reviews = []
for number in range(400):
    words = (BAD, GOOD)[number % 2]
    said = [f"the {random.choice(THINGS)} was {random.choice(words)}" for _ in range(random.randint(1, 4))]
    reviews.append({"review": ", and ".join(said), "verdict": ("bad", "good")[number % 2]})
Path("reviews.jsonl").write_text("".join(json.dumps(review) + "\n" for review in reviews))

tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
trainer = trainers.WordLevelTrainer(vocab_size=200, special_tokens=special, show_progress=False)
tokenizer.train_from_iterator((review["review"] for review in reviews), trainer)
ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained("tokenizer")
