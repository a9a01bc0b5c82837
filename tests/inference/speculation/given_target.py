"""The target's answers as a test gives them, in the place of the engine's TargetScores."""

from dataclasses import dataclass

import torch


@dataclass
class GivenTarget:
    """batch: the requests' rows; drafted [B, N]; tokens [B, N]: the target's own; given: what `distributions` gives."""

    batch: object
    drafted: torch.Tensor
    tokens: torch.Tensor | None = None
    given: tuple | None = None

    def sample(self):
        return self.tokens

    def distributions(self):
        return self.given if len(self.given) == 3 else (*self.given, None)
