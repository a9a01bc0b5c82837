"""The loss that a run minimises: its name and weights. Formulas and kernel: kernels/training/distill_loss.py.

The weight of kl within lk is exp(-eta a), where a is a depth's mean rate of acceptance over all its labels in the previous step. So
it is known beforehand, and the same on every rank. (The paper's authors take the current step: arXiv 2602.23881.) Weighting every
label by its own rate gave less acceptance than kl alone (docs/log.md). tv, the total variation distance of the two distributions,
is one minus the rate of acceptance: lk without kl.
"""

import math
from dataclasses import dataclass

from ...kernels.training import distill_loss

LOSSES = (*distill_loss.LOSSES, "tv")


@dataclass(frozen=True)
class Loss:
    """A loss: its name, the eta of lk, and weight and number of tokens of HASS's term, which can be added to any loss."""

    name: str = "kl"
    eta: float = 3.0
    top_k_weight: float = 0.0
    top_k: int = 10

    def __post_init__(self):
        if self.name not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.name!r}")

    def kl_weight(self, acceptance):
        """The weight of kl within lk at this rate of acceptance: 1 at rate 0."""
        return 0.0 if self.name == "tv" else math.exp(-self.eta * acceptance)

    @property
    def formula(self):
        """The name of the formula that the kernel computes."""
        return "lk" if self.name == "tv" else self.name

    @property
    def needs_target(self):
        """Whether the loss needs the target's distribution, and not only the text."""
        return self.name != "hard" or self.top_k_weight > 0

    @property
    def needs_label(self):
        """Whether the loss cannot count a label that is outside the draft vocabulary."""
        return self.name == "hard"
