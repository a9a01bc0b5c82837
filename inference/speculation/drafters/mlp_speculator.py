"""Drafting with an MLP speculator: a small state that starts from the target's last hidden state, updated by every drafted token.

Letters: B requests, n nodes of a level, H hidden, S inner size, V vocabulary.
"""

import torch

from ....kernels.jit import on_triton
from ....kernels.linear.linear import linear_parts
from ....kernels.rms_norm import rms_norm
from ....kernels.speculation.speculator_state import speculator_state
from .drafter import free_weights
from .lm_heads import WholeLMHead
from .sequential import SequentialDrafter


class MLPSpeculatorDrafter(SequentialDrafter):
    """Drafts chains and trees with an MLPSpeculator.

    head: the module, read in place (updates of a head in training apply at once, but not to what is quantised); sampling: a way of
    draft_sampling.py.
    """

    can_quantise = True

    def __init__(self, head, decoder=None, num_speculative_tokens=None, sampling="shared_noise"):
        super().__init__(sampling)
        self.head, self.num_speculative_tokens = head, head.num_speculative_tokens
        weight = head.emb[0].weight
        self.dtype = weight.dtype
        self.lm_heads = {}  # {lm_head: one of lm_heads.py}, on several ranks and in 8 bits
        self.no_norm = torch.ones(head.config.hidden_size, dtype=weight.dtype, device=weight.device)

    def quantise(self, release):
        """Round the lm_heads, all of one size."""
        for one in self._modules():
            self.lm_heads[one] = WholeLMHead(one.weight).in_8_bits()
        saved = one.weight.nbytes - self.lm_heads[one].weight.nbytes
        self.saved_bytes = {"first": saved, "level": saved}
        if release:
            free_weights(self._modules())

    def place_lm_heads(self, lm_heads):
        self.lm_heads = {one: lm_heads(one.weight) for one in self._modules()}

    def _modules(self):
        """The lm_heads of all depths, each once."""
        modules = [self.head.modules_of(depth)[-1] for depth in range(self.head.max_speculative_tokens)]
        return list(dict.fromkeys(modules))

    def start(self, batch):
        feature = batch.feature.to(self.dtype)
        if self.head.config.scale_input and on_triton(feature):
            feature = rms_norm(feature, self.no_norm, self.head.epsilon) * 0.5**0.5
        else:
            feature = self.head.start(feature)
        return self._move_on(feature[:, None], batch.root[:, None], 0)

    def expand(self, batch, level, tokens, state):
        return self._move_on(state, tokens, level.depth)

    def _move_on(self, state, tokens, depth):
        """state [B, n, H or S], tokens [B, n]  ->  logits [n, B, V], state [B, n, S]"""
        head = self.head
        emb, proj, ln, lm_head = head.modules_of(depth)
        if not on_triton(state):
            # The library's products are faster on the CPU; their bits may depend on the number of rows.
            state = head.step(state, tokens, depth)
            rows = state.transpose(0, 1)
            return self._product(rows, lm_head) if self.lm_heads else head.logits(rows, depth), state
        parts = linear_parts(state.flatten(0, 1), proj.weight)
        multiplier = head.token_weight / head.state_weight
        state = speculator_state(parts, tokens.flatten(), emb.weight, multiplier, ln.weight, ln.bias, head.epsilon)
        state = state.view(*tokens.shape, -1)
        return self._product(state.transpose(0, 1), lm_head), state

    def _product(self, rows, lm_head):
        """[n, B, S] -> [n, B, V]"""
        placed = self.lm_heads.get(lm_head) or WholeLMHead(lm_head.weight)
        return placed.product(rows.reshape(-1, rows.shape[-1])).view(*rows.shape[:2], -1)


DRAFTER = MLPSpeculatorDrafter
