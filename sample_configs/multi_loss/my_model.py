from torch import nn


class Digits(nn.Module):
    """Encodes images; one head names the digit, another one draws the image again."""

    def __init__(self, width=128, code=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, code))
        self.classify = nn.Linear(code, 10)
        self.draw = nn.Sequential(nn.Linear(code, width), nn.GELU(), nn.Linear(width, 64))

    def forward(self, image):  # (B, 64)
        code = self.body(image)
        return {"logits": self.classify(code), "drawn": self.draw(code), "code": code}
