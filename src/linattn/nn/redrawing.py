"""When random maps draw anew during training."""

import hashlib
from typing import Any

from torch import nn

from linattn.feature_maps import RandomFeatureMap
from linattn.softmax.checking import check_count, check_seed


class RedrawSchedule:
    """Redraw a model's random maps every so many training steps, as the Performer was trained.

        draw number n = step // every, n ≥ 1: map i has W(seed_i,n),   seed_i,n a digest of (seed, i, n)

    A draw is a function of numbers alone, so that every rank has the same one, whatever else it draws, and a run that
    goes on from a checkpoint has those of an uncut run. Call `step` once after each step of the optimiser. States and
    graphs do not outlive a redraw: attention refuses them, those of checkpoints too. Cost of a redraw: O(R·D²) per map.

    Attributes:
        num_steps: how many steps there were.

    Args:
        model: the module whose random maps are redrawn; one that several layers share is drawn once.
        every: how many steps a draw serves, ≥ 1.
        seed: of the schedule.

    Raises:
        TypeError, ValueError: `model` is no module or has no random map; `every` or `seed` is no integer in its range.

    Example:
        >>> from linattn.feature_maps import FavorPlus
        >>> from linattn.nn import LinearAttention
        >>> layer = LinearAttention(8, 2, FavorPlus(4, 16))
        >>> schedule = RedrawSchedule(layer, every=2)
        >>> [schedule.step() for _ in range(4)]
        [False, True, False, True]

    Source: Choromanski et al. 2021 (arXiv 2009.14794), section 4.2 and figure 5.
    """

    def __init__(self, model: nn.Module, *, every: int, seed: int = 0) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.model, self.num_steps = model, 0
        self.every, self.seed = check_count("every", every), check_seed(seed)
        if not self._maps():
            raise ValueError(f"{type(model).__name__} has no map that is drawn, hence nothing to redraw")

    def step(self) -> bool:
        """Count one step of training, and redraw if one is due.

        Returns:
            Whether the maps were redrawn.

        Raises:
            RuntimeError: the model is in evaluation mode, in which nothing is drawn.
        """
        if not self.model.training:
            raise RuntimeError("a redraw in evaluation would change the model; call model.train() before training")
        self.num_steps += 1
        if is_due := self.num_steps % self.every == 0:
            self._draw()
        return is_due

    def state_dict(self) -> dict[str, int]:
        """Three numbers for a checkpoint, to resume from."""
        return {"num_steps": self.num_steps, "every": self.every, "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint: the maps have its draw afterwards; before a first draw they keep that of the model.

        Raises:
            ValueError: numbers are missing or negative.
        """
        names = ("num_steps", "every", "seed")
        numbers = {name: state_dict.get(name) for name in names}
        if not all(type(value) is int and value >= 0 for value in numbers.values()) or numbers["every"] == 0:
            raise ValueError(f"a schedule's state has the integers {', '.join(names)}, got {dict(state_dict)}")
        self.num_steps, self.every, self.seed = (int(state_dict[name]) for name in names)
        if self.num_steps >= self.every:
            self._draw()

    def _maps(self) -> list[RandomFeatureMap]:
        """The model's maps that are drawn, each once, in order."""
        return [part for part in self.model.modules() if isinstance(part, RandomFeatureMap)]

    def _draw(self) -> None:
        """Give every map the draw of the present step."""
        number = self.num_steps // self.every
        for place, drawn in enumerate(self._maps()):
            written = hashlib.blake2b(f"{self.seed}/{place}/{number}".encode(), digest_size=8).digest()
            drawn.redraw(int.from_bytes(written) >> 1)
