import math

from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):  # (B, T, width)
        query, key, value = self.attend(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, heads, T, width / heads)
        x = x + self.project(found.transpose(1, 2).flatten(2))
        return x + self.think(self.norm2(x))


class GPT(nn.Module):
    """A transformer that predicts the next character at each place of a text of at most `window` characters."""

    def __init__(self, window, width=128, layers=3, heads=4, vocabulary_size=128):
        super().__init__()
        self.window = window
        self.characters, self.places = nn.Embedding(vocabulary_size, width), nn.Embedding(window, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary_size)
        for each in self.modules():
            if isinstance(each, nn.Linear | nn.Embedding):
                nn.init.normal_(each.weight, std=0.02)

    def forward(self, tokens):  # (B, T)
        x = self.characters(tokens) + self.places.weight[: tokens.shape[1]]
        return {"logits": self.head(self.norm(self.blocks(x))).transpose(1, 2)}  # (B, vocabulary_size, T)


def bits(loss):
    return loss / math.log(2)
