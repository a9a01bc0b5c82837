"""SiLU-and-multiply of a gated MLP: y = gate / (1 + exp(-gate)) * up, both halves of one packed product.

    gate_up [M, 2 I]  ->  [M, I]

Computed in fp32 at least. The formula is written out because the library's silu takes another exponential for the elements
that do not fill a vector register: its last bit depends on where a row stands. torch.exp does not.
"""

import torch


def silu_mul(gate_up):
    """silu(gate_up[:, :I]) * gate_up[:, I:].  [M, 2 I] -> [M, I]; ValueError if the width is odd"""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"silu_mul takes gate and up side by side, got an odd width of {gate_up.shape[-1]}")
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(wide).chunk(2, -1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)
