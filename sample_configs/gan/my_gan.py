import torch
from torch import nn
from torch.nn.functional import softplus

import emrun


class Networks(nn.Module):
    """A generator of images of 64 pixels, and a discriminator that tells them from real ones."""

    def __init__(self, noise=16, width=128):
        super().__init__()
        self.noise = noise
        self.generator = nn.Sequential(
            nn.Linear(noise, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(width, 1)
        )

    def forward(self, image):
        made = self.generator(torch.randn(len(image), self.noise, device=image.device))
        of_real, of_made = self.discriminator(image), self.discriminator(made)
        return {
            "discriminator_loss": softplus(-of_real) + softplus(of_made),
            "generator_loss": softplus(-of_made),
            "found": ((of_real > 0).float() + (of_made < 0).float()) / 2,
            "image_made": made,
        }


class Gan(emrun.TorchModel):
    """Trains the discriminator and then the generator, each with its own optimizer and loss."""

    def train_step(self, inputs):
        for name in ("discriminator", "generator"):
            outputs = self.forward(inputs)
            self.backward(outputs[f"{name}_loss"].mean(), optimizer=name)
            self.update(name)
        return outputs
