import torch
from torch import nn
from torch.nn.functional import logsigmoid, scaled_dot_product_attention


class Mixer(nn.Module):
    """Combines each place of a sequence with those before it; a derived class says how, for each head."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):  # (B, T, width)
        query, key, value = self.attend(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.project(self.mix(x, query, key, value).transpose(1, 2).flatten(2))


class Attention(Mixer):
    def mix(self, x, query, key, value):  # (B, T, width), and three times (B, heads, T, width / heads)
        return scaled_dot_product_attention(query, key, value, is_causal=True)


class MLSTM(Mixer):
    """A matrix memory with exponential input gates, sigmoid forget gates and output gates, in its parallel form."""

    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.gates, self.output = nn.Linear(width, 2 * heads), nn.Linear(width, width)
        self.norm = nn.GroupNorm(heads, width)
        nn.init.zeros_(self.gates.weight)
        with torch.no_grad():
            self.gates.bias.copy_(torch.cat([torch.full((heads,), -2.0), torch.linspace(3, 6, heads)]))

    def mix(self, x, query, key, value):
        enter, forget = self.gates(x).transpose(1, 2).chunk(2, 1)  # (B, heads, T)
        found = parallel_mlstm(query, key, value, enter, forget)  # (B, heads, T, width / heads)
        places = found.transpose(1, 2).flatten(0, 1).flatten(1)  # (B T, width): the norm is that of each place and head
        normed = self.norm(places).view_as(x) * torch.sigmoid(self.output(x))
        return normed.unflatten(2, (self.heads, -1)).transpose(1, 2)


def parallel_mlstm(query, key, value, enter, forget):
    """Return what the memory C_t = f_t C_(t-1) + i_t v_t k_t^T gives for each query, divided by max(|n_t q_t|, 1).

    Args:
        query, key, value: of shape (B, heads, T, size).
        enter: the logarithms of the input gates i, of shape (B, heads, T).
        forget: the logits of the forget gates f.
    """
    kept = logsigmoid(forget).cumsum(2)
    weights = kept[..., :, None] - kept[..., None, :] + enter[..., None, :]
    past = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()
    weights = weights.masked_fill(~past, -torch.inf)
    most = weights.amax(3, keepdim=True)  # so that no exponential overflows
    scores = query @ key.mT / query.shape[3] ** 0.5 * (weights - most).exp()
    return scores @ value / torch.maximum(scores.sum(3, keepdim=True).abs(), (-most).exp())


class Block(nn.Module):
    def __init__(self, mixer, width, heads):
        super().__init__()
        self.norm1, self.norm2, self.mixer = nn.LayerNorm(width), nn.LayerNorm(width), mixer(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Predicts the next character at each place of a text of at most `window` characters."""

    def __init__(self, mixer, window, width=64, layers=2, heads=4, vocabulary_size=128):
        super().__init__()
        self.characters, self.places = nn.Embedding(vocabulary_size, width), nn.Embedding(window, width)
        self.blocks = nn.Sequential(*(Block(mixer, width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary_size)
        for each in (self.characters, self.places, self.head):
            nn.init.normal_(each.weight, std=0.02)

    def forward(self, tokens):  # (B, T)
        x = self.characters(tokens) + self.places.weight[: tokens.shape[1]]
        return {"logits": self.head(self.norm(self.blocks(x))).mT}  # (B, vocabulary_size, T)
