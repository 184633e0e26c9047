from peft import get_peft_model
from torch import nn


class Classifier(nn.Module):
    """Passes the output of a tokenizer to a model of transformers, which may get peft's adapters."""

    def __init__(self, bert, adapter=None):
        super().__init__()
        self.bert = bert if adapter is None else get_peft_model(bert, adapter)

    def forward(self, tokens):
        return {"logits": self.bert(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits}
