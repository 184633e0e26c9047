"""Tokenizers for tests: small real ones in directories, and one that needs no library."""

import re

WORDS = [f"w{number}" for number in range(50)]
MARKED = (
    "{% for m in messages %}{{ '<' + m.role + '> ' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + ' <end>' }}{% endgeneration %}{% else %}{{ m.content + ' <end>' }}{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
PLAIN = re.sub(r"{% (end)?generation %}", "", MARKED)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<end>", "<user>", "<assistant>", "<system>"]


def save_tokenizer(folder, template=None, pad="[PAD]", ends=True, words=WORDS, **more):
    """Save a tokenizer of words; return its directory. With `ends`, texts begin with [CLS] and end with [SEP]."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends:
        around = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
        tokens.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="[UNK]", pad_token=pad, eos_token="<end>", **more
    )
    found.chat_template = template
    found.save_pretrained(folder)
    return str(folder)


class Words:
    """A tokenizer of single words, with what datasets ask of one of transformers."""

    pad_token = "[PAD]"
    eos_token = eos_token_id = None
    model_max_length = 10**30
    is_fast = True
    chat_template = PLAIN

    def __init__(self):
        self.vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}

    def __call__(self, texts, **options):
        found = Found(input_ids=[], offset_mapping=[])
        for text in texts:
            words = list(re.finditer(r"\S+", text))[: options.get("max_length")]
            found["input_ids"].append([self.vocabulary.get(each[0], 1) for each in words])
            found["offset_mapping"].append([each.span() for each in words])
        return found

    def __len__(self):
        return len(self.vocabulary)

    def get_vocab(self):
        return self.vocabulary

    def get_chat_template(self):
        return self.chat_template

    def num_special_tokens_to_add(self):
        return 0

    def apply_chat_template(self, chats, tokenize, add_generation_prompt=False):
        is_one = isinstance(chats[0], dict)
        end = "<assistant> " if add_generation_prompt else ""
        found = [
            "".join(f"<{m['role']}> {m['content']} <end> " for m in chat) + end
            for chat in ([chats] if is_one else chats)
        ]
        return found[0] if is_one else found


class Found(dict):
    """What a tokenizer returns."""

    encodings = None
