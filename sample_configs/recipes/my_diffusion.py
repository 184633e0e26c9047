import torch
from torch import nn


class Flow(nn.Module):
    """Diffusion with straight paths (flow matching): learns the direction from the data to the noise at each point."""

    def __init__(self, size=64, width=256):
        super().__init__()
        self.size = size
        self.layers = nn.Sequential(
            *(nn.Linear(size + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, size))
        )

    def direction(self, x, t):
        return self.layers(torch.cat([x, t], dim=1))

    def forward(self, image):
        data = 2 * image - 1
        if self.training:  # torch's generator, which checkpoints keep
            t, noise = torch.rand_like(data[:, :1]), torch.randn_like(data)
        else:  # the same for each evaluation, so that epochs can be compared
            rng = torch.Generator(data.device).manual_seed(0)
            t = (torch.arange(len(data), device=data.device) % 10 + 0.5)[:, None] / 10
            noise = torch.randn(data.shape, generator=rng, device=data.device)
        found = self.direction((1 - t) * data + t * noise, t)
        return {"loss": (found - (noise - data)).square().mean(dim=1)}

    @torch.no_grad()
    def sample(self, count, steps=50, seed=0):
        """Return new images, float32 of shape (count, size), by going from noise to data in small steps."""
        x = torch.randn(count, self.size, generator=torch.Generator().manual_seed(seed))
        for step in range(steps, 0, -1):
            x = x - self.direction(x, torch.full((count, 1), step / steps)) / steps
        return (x + 1) / 2
