"""Writes chats.jsonl, and a tokenizer of bytes and frequent parts of words, with a chat template."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

random.seed(0)
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

chats = []
for _ in range(300):
    messages = []
    for _ in range(random.randint(1, 3)):
        number = random.randrange(8)
        messages.append({"role": "user", "content": f"What comes after {NUMBERS[number]}?"})
        messages.append({"role": "assistant", "content": f"After {NUMBERS[number]} comes {NUMBERS[number + 1]}."})
    chats.append({"messages": messages})
Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
special = ["<pad>", "<begin>", "<end>"]
trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
tokenizer.train_from_iterator((message["content"] for chat in chats for message in chat["messages"]), trainer)
found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
found.chat_template = (
    "{% for message in messages %}<begin>{{ message.role }}\n{{ message.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<begin>assistant\n{% endif %}"
)
found.save_pretrained("tokenizer")
