"""Drafting with an MLP speculator: a small state, started from the target's last hidden state and moved on by every drafted token.

Letters: B requests, n nodes of a level, H hidden, S inner size, V vocabulary.
"""

from ...kernels.jit import on_triton
from ...kernels.linear import linear
from .sequential import SequentialDrafter


class MLPSpeculatorDrafter(SequentialDrafter):
    """Drafts chains and static trees with an MLPSpeculator.

    head: the module, read in place (a head in training is used as it is at the moment); drawing: a way of draw_children.py.
    """

    def __init__(self, head, drawing="shared_noise"):
        super().__init__(drawing)
        self.head, self.num_speculative_tokens = head, head.num_speculative_tokens
        self.dtype = next(head.parameters()).dtype

    def start(self, batch):
        state = self.head.start(batch.feature.to(self.dtype))[:, None]  # [B, 1, H]
        return self._move_on(state, batch.root[:, None], 0)

    def expand(self, batch, level, tokens, state):
        return self._move_on(state, tokens, level.depth)

    def _move_on(self, state, tokens, depth):
        """state [B, n, H or S], tokens [B, n]  ->  logits [n, B, V], state [B, n, S]"""
        state = self.head.step(state, tokens, depth)
        rows = state.transpose(0, 1)  # [n, B, S]
        if not on_triton(state):
            # Drafts need not be row-invariant: the library's products are faster on the CPU.
            return self.head.logits(rows, depth), state
        weight = self.head.lm_head_of(depth)
        return linear(rows.reshape(-1, rows.shape[-1]), weight).view(*rows.shape[:2], -1), state
