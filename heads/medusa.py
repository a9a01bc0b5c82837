"""Medusa heads (arXiv 2401.10774): K small heads that read the target's last hidden state and predict several tokens ahead.

Head k (0-based) reads x = the hidden state after the final norm at position t and predicts the token at t + 2 + k:

    ResBlock(x) = x + SiLU(W x + b)          W [H, H] and b [H] start at zero: every block starts as the identity
    logits_k    = lm_head_k(ResBlock_{k,R-1}(... ResBlock_{k,0}(x)))

`lm_head_k` belongs to the head (initialised from the target's) or is the target's own, shared by all heads. Each head has
blocks of its own; nothing is tied between heads.

Letters: H hidden size, V vocabulary, K heads, R residual blocks per head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of a set of Medusa heads. `hidden_size` and `vocab_size` are the target's."""

    hidden_size: int
    vocab_size: int
    num_heads: int = 4  # K
    num_layers: int = 1  # R
    shared_lm_head: bool = False
    base_model_name_or_path: str = ""
    adapter: str = ""  # which adapter of the target they were trained together with (its fingerprint); "": none

    def __post_init__(self):
        for name, least in (("hidden_size", 1), ("vocab_size", 2), ("num_heads", 1), ("num_layers", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"MedusaConfig.{name} must be a whole number of at least {least}, got {value!r}")


class ResBlock(nn.Module):
    """x + SiLU(W x + b), the identity until it is trained.  [..., H] -> [..., H]"""

    def __init__(self, hidden_size):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """One head: R residual blocks and, unless the target's is shared, an lm_head [V, H] without bias."""

    def __init__(self, config):
        super().__init__()
        self.blocks = nn.ModuleList(ResBlock(config.hidden_size) for _ in range(config.num_layers))
        self.lm_head = None
        if not config.shared_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class Medusa(nn.Module):
    """K Medusa heads over one feature of the target.

    features: what it reads from the target (`final`: the last hidden state after the final norm).
    num_speculative_tokens: how many tokens ahead it can draft (K).
    """

    features = ("final",)
    needs_embedding = embedding_is_targets = False

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(MedusaHead(config) for _ in range(config.num_heads))

    @property
    def num_speculative_tokens(self):
        return self.config.num_heads

    @property
    def label_offsets(self):
        """Head k at position t predicts the token at t + label_offsets[k]."""
        return tuple(2 + k for k in range(self.config.num_heads))

    def initialize_from_target(self, lm_head_weight):
        """Start every own lm_head as a copy of the target's [V, H]; a shared one needs nothing.

        Raises ValueError if the target has another hidden size or vocabulary than the config says.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        if tuple(lm_head_weight.shape) != expected:
            raise ValueError(
                f"the target's lm_head is {tuple(lm_head_weight.shape)}, the head's config says "
                f"(vocab_size, hidden_size) = {expected}: build the head from this target's config"
            )
        with torch.no_grad():
            for head in self.heads:
                if head.lm_head is not None:
                    head.lm_head.weight.copy_(lm_head_weight)

    def hidden(self, features, depth):
        """The state that head `depth` hands to its lm_head.  [..., H] -> [..., H]"""
        for block in self.heads[depth].blocks:
            features = block(features)
        return features

    def logits(self, features, depth, lm_head_weight=None):
        """Prediction of head `depth`.  [..., H] -> [..., V]

        lm_head_weight: the target's lm_head [V, H]; needed where it is shared, ignored otherwise.
        """
        own = self.heads[depth].lm_head
        if own is None and lm_head_weight is None:
            raise ValueError("these heads share the target's lm_head: pass lm_head_weight=target.lm_head.weight")
        weight = lm_head_weight if own is None else own.weight
        return F.linear(self.hidden(features, depth), weight)

    def forward(self, features, lm_head_weight=None):
        """Predictions of all heads and their label offsets.  [..., H] -> (K tensors [..., V], K offsets)"""
        logits = [self.logits(features, k, lm_head_weight) for k in range(self.config.num_heads)]
        return logits, self.label_offsets
