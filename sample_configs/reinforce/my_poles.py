import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Poles:
    """Poles on carts (Barto, Sutton and Anderson, 1983): an action pushes a cart to the left or to the right."""

    def __init__(self, rng, count):
        self.rng, self.states, self.ages = rng, rng.uniform(-0.05, 0.05, (count, 4)), np.zeros(count, int)

    def step(self, push):  # (count,), whether to the right; returns which poles have ended and begin again
        _, speed, angle, turning = self.states.T
        force = (np.where(push, 10.0, -10.0) + 0.05 * turning**2 * np.sin(angle)) / 1.1
        turn = (9.8 * np.sin(angle) - np.cos(angle) * force) / (2 / 3 - np.cos(angle) ** 2 / 22)
        self.states += 0.02 * np.stack([speed, force - turn * np.cos(angle) / 22, turning, turn], axis=1)
        self.ages += 1
        ended = (np.abs(self.states[:, 0]) > 2.4) | (np.abs(self.states[:, 2]) > 0.209) | (self.ages >= 500)
        self.states[ended], self.ages[ended] = self.rng.uniform(-0.05, 0.05, (ended.sum(), 4)), 0
        return ended


class Rollouts:
    """Batches that the policy makes: what it did in the next steps of all poles, and the rewards that followed."""

    def __init__(self, policy, rng, count, steps, discount):
        self.policy, self.poles, self.steps, self.discount = policy, Poles(rng, count), steps, discount

    def __iter__(self):
        while True:
            states, pushes, goes_on = [], [], []
            for _ in range(self.steps):
                right = self.policy(self.poles.states)[0]
                states.append(self.poles.states.astype(np.float32))
                pushes.append(self.poles.rng.random(len(right)) < right)
                goes_on.append(~self.poles.step(pushes[-1]))
            later = self.policy(self.poles.states)[1]
            returns = [later := 1.0 + self.discount * each * later for each in reversed(goes_on)][::-1]
            yield {
                "state": np.concatenate(states),
                "action": np.concatenate(pushes).astype(np.int64),
                "returns": np.concatenate(returns).astype(np.float32),
            }

    def state_dict(self):  # so that a resume is exact: the generator and the poles as they stand
        return {"rng": self.poles.rng, "states": self.poles.states, "ages": self.poles.ages}

    def load_state_dict(self, state):
        vars(self.poles).update(state)


class Balancing:
    """A dataset that asks the model: emrun gives it the model since its constructor takes one."""

    def __init__(self, model, count=32, steps=64, discount=0.98):
        self.model, self.arguments = model, (count, steps, discount)

    @torch.no_grad()
    def policy(self, states):
        found = self.model.module(torch.as_tensor(states, dtype=torch.float32, device=self.model.device))
        return found["logits"].softmax(dim=1)[:, 1].cpu().numpy(), found["value"].cpu().numpy()

    def train_stream(self, ctx):
        return Rollouts(self.policy, ctx.rng, *self.arguments)

    def valid_stream(self, ctx):
        poles = Poles(ctx.rng, 20)
        first, steps, standing = poles.states.astype(np.float32), np.zeros(20, np.float32), np.ones(20, bool)
        while standing.any():
            steps += standing
            standing &= ~poles.step(self.policy(poles.states)[0] > 0.5)
        yield {"state": first, "steps": steps}


class ActorCritic(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.act, self.judge = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, state, action=None, returns=None):
        features = self.layers(state)
        found = {"logits": self.act(features), "value": self.judge(features).squeeze(1)}
        if action is not None:
            gain = (returns - found["value"]).detach()
            log = found["logits"].log_softmax(dim=1)
            entropy = -(log.exp() * log).sum(dim=1)
            error = (found["value"] - returns) ** 2
            found["loss"] = cross_entropy(log, action, reduction="none") * gain + 0.01 * error - 0.01 * entropy
        return found
