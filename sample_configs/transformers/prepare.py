"""Trains a small tokenizer on the descriptions of scikit-learn's datasets, as transformers' fast tokenizers are."""

from my_data import descriptions
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train_from_iterator(
    descriptions(), trainers.BpeTrainer(vocab_size=400, special_tokens=["[PAD]"], initial_alphabet=alphabet)
)
tokenizer.save("tokenizer.json")
