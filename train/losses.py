"""Which loss a run minimises. The formulas, and what computes them: kernels/distill_loss.py."""

from dataclasses import dataclass

from ..kernels.distill_loss import LOSSES


@dataclass(frozen=True)
class Loss:
    """Which loss: its name, the eta of lk, and weight and number of tokens of HASS's term, which is added to any of them."""

    name: str = "kl"
    eta: float = 3.0
    top_k_weight: float = 0.0
    top_k: int = 10

    def __post_init__(self):
        if self.name not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.name!r}")

    @property
    def needs_law(self):
        """Is the target's law a part of it, or the text alone?"""
        return self.name != "hard" or self.top_k_weight > 0
