"""What each of several ranks keeps for itself of a state of the training: the rest is the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emrun.base.encoding import random_state
from emrun.base.randomness import preserved_randomness, seed_everything
from emrun.events import merges
from emrun.hook import AbstractHook
from emrun.model import AbstractModel
from emrun.ranks.group import Ranks
from emrun.storage.checkpoints.state_file import keyed


class RankStates:
    """Collects the parts of all ranks when a state is saved, and gives each rank its own when it is loaded.

    Args:
        model: the model.
        hooks: the hooks.
        ranks: the ranks.
        seed: the seed of the run.
    """

    def __init__(self, model: AbstractModel, hooks: list[AbstractHook], ranks: Ranks, seed: int) -> None:
        self._model = model
        self._hooks = hooks
        self._ranks = ranks
        self._seed = seed
        self._later: list[tuple[AbstractHook, list[Mapping[str, Any]]]] = []

    def with_parts(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with what the other ranks keep for themselves; all ranks call this."""
        if "ranks" in state:
            return state
        return {**state, "ranks": self._ranks.gathered("states of the ranks", self._own_part(state))[1:]}

    def _own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a rank keeps for itself of a state: the rest is the same on all ranks."""
        merged = [key for key, hook in keyed(self._hooks).items() if merges(hook)]
        began = state["epoch_began"]
        return {
            "random": state["random"],
            "epoch_began": began["random"] if began is not None else None,
            "model": self._model.of_rank(state["model"]),
            "hooks": {key: state["hooks"][key] for key in merged},
            "streams": state["streams"],
        }

    def of_this_rank(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a loaded state with the part of this rank, or what stands for it with another number of ranks."""
        self._later = []
        other_parts = state.get("ranks") or []
        rank = self._ranks.rank
        is_same_size = len(other_parts) + 1 == self._ranks.size
        if is_same_size and not rank:
            return state
        part = other_parts[rank - 1] if is_same_size else self._new_part(state, other_parts)
        began = state["epoch_began"]
        if began is not None and part["epoch_began"] is not None:
            state = {**state, "epoch_began": {**began, "random": part["epoch_began"]}}
        of_both = {key: {**state[key], **part[key]} for key in ("model", "hooks")}
        return {**state, **of_both, "random": part["random"], "streams": part["streams"]}

    def _new_part(self, state: dict[str, Any], other_parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the part of a rank of another number of ranks: rank 0 has what was collected, others nothing."""
        streams = {name: _without_checksum(position) for name, position in state["streams"].items()}
        merged = {key: hook for key, hook in keyed(self._hooks).items() if merges(hook)}
        hooks = {}
        random = state["random"]
        began = None
        if self._ranks.is_first:
            self._later = [
                (hook, [part["hooks"][key] for part in other_parts])
                for key, hook in merged.items()
                if other_parts and key in other_parts[0]["hooks"]
            ]
        else:
            hooks = {key: hook.state_dict() for key, hook in merged.items()}
            with preserved_randomness():
                seed_everything(self._seed, "rank", self._ranks.rank, "iteration", state["loop"]["iterations_done"])
                random = began = random_state()
        parts = [self._model.of_rank(state["model"]), *(part["model"] for part in other_parts)]
        model = self._model.of_new_rank(parts, is_first=self._ranks.is_first)
        return {"random": random, "epoch_began": began, "model": model, "hooks": hooks, "streams": streams}

    def merge(self) -> None:
        """Give hooks what other ranks had collected, of which there are none now; after their own state is loaded."""
        for hook, states in self._later:
            hook.merge(states)


def _without_checksum(position: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position in a stream without the checksum of the last batch, of which each rank has other rows."""
    end = position.get("end_of_pass")
    new_position = {**position, "end_of_pass": {**end, "digest": None}} if end is not None else dict(position)
    return {**new_position, "digest": None} if "digest" in new_position else new_position
