"""Which loss a run minimises. The formulas, and what computes them: kernels/training/distill_loss.py.

The weight of kl within lk is exp(-eta a), where a is a depth's mean rate of acceptance over all its labels in the step before: then
it is known beforehand, and the same on every rank. (The paper's authors take the current step: arXiv 2602.23881.) Weighing every
label by its own rate gave less acceptance than kl alone (docs/log.md).
"""

import math
from dataclasses import dataclass

from ...kernels.training.distill_loss import LOSSES


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

    def kl_weight(self, acceptance):
        """The weight of kl within lk where drafts are accepted at this rate: 1 where none is."""
        return math.exp(-self.eta * acceptance)

    @property
    def needs_target(self):
        """Is the target's distribution a part of it, or the text alone?"""
        return self.name != "hard" or self.top_k_weight > 0
