"""Muon: momentum whose direction is orthogonalised, for weight matrices (Jordan et al. 2024)."""

import torch


class Muon:
    """Momentum, orthogonalised by five Newton-Schulz steps (Jordan et al. 2024), for all matrices of one shape at once."""

    def __init__(self, matrices, momentum=0.95):
        shapes = {}
        for matrix in matrices:
            shapes.setdefault(matrix.shape, []).append(matrix)
        self.momentum = momentum
        self.groups = [
            (group, torch.zeros(len(group), *shape, device=group[0].device)) for shape, group in shapes.items()
        ]

    @torch.no_grad()
    def step(self, rate, weight_decay):
        for matrices, moment in self.groups:
            gradient = torch.stack([matrix.grad for matrix in matrices])
            moment.lerp_(gradient, 1 - self.momentum)
            update = orthogonalize(gradient.lerp_(moment, self.momentum))  # Nesterov
            scale = max(1, moment.shape[1] / moment.shape[2]) ** 0.5
            torch._foreach_mul_(matrices, 1 - rate * weight_decay)
            torch._foreach_add_(matrices, list(update.to(moment.dtype).unbind()), alpha=-rate * scale)


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """[G, M, N] -> the nearest matrices whose singular values lie around 1 (0.7 to 1.2)."""
    x = x.bfloat16() if x.is_cuda else x.float()  # a CPU takes five times as long in bfloat16
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if wide else x.mT
