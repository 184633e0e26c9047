import json

import pandas as pd
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

chats = pd.read_json("chats.jsonl", lines=True)["messages"].sample(frac=1, random_state=1).tolist()
held = len(chats) // 10
words = Tokenizer(models.BPE())
words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
words.decoder = decoders.ByteLevel()
texts = [message["content"] for chat in chats[held:] for message in chat]
special = ["<pad>", "<begin>", "<end>"]
words.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=320, special_tokens=special))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", padding_side="left")
tokenizer.chat_template = (
    "{% for message in messages %}<begin>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<end>{% endgeneration %}"
    "{% else %}{{ message.content }}<end>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<begin>assistant\n{% endif %}"
)


def example(chat):
    row = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    labels = [
        token if trained else -100 for token, trained in zip(row["input_ids"], row["assistant_masks"], strict=True)
    ]
    return {"input_ids": row["input_ids"], "labels": labels}


sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
trainer = Trainer(
    model=LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)),
    args=TrainingArguments(
        "run",
        num_train_epochs=6,
        per_device_train_batch_size=12,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to="none",
        seed=1,
    ),
    data_collator=DataCollatorForSeq2Seq(tokenizer),
    train_dataset=[example(chat) for chat in chats[held:]],
    eval_dataset=[example(chat) for chat in chats[:held]],
)
trainer.train()
print(trainer.evaluate())
with open("new.jsonl") as file, open("answers.jsonl", "w") as answers:
    for line in file:
        chat = json.loads(line)["messages"]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        with torch.no_grad():
            found = trainer.model.generate(**asked, max_new_tokens=50, do_sample=False, pad_token_id=0)
        answer = tokenizer.decode(found[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        answers.write(json.dumps({"chat": chat, "generated": answer}) + "\n")
