"""The MLP speculator (arXiv 2404.19124, IBM's "accelerator"): one small state, updated by every drafted token.

The state starts from the target's last hidden state after the final norm at position t. Step i (0-based) mixes in the token at
t + 1 + i, which the target (i = 0) or the speculator itself has just produced, and predicts the token at t + 2 + i:

    state   = feature; with scale_input, the RMS-normalised feature / sqrt(2)
    state   = GELU(ln_i(proj_i(state) + (ew / sw) emb_i(token_i)))        sw = 0.5^(0.5 / n), ew = sqrt((1 - sw^2) S / 2)
    logits  = head_i(state)
    ln(x)   = x / sqrt(mean(x^2) + 1e-6) * weight + bias                  no mean is taken away; GELU is the exact one

The weights sw and ew keep feature and tokens balanced: over n steps the feature's share of the state falls to a half. With
tie_weights all steps share emb, ln and head, and all but the first share proj (the first is [S, H]).

Letters: H hidden size of the target, S inner size, V vocabulary, n steps.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .head import Head, Predictions, bytes_of, next_tokens

_EPSILON = 1e-6


@dataclass(frozen=True)
class MLPSpeculatorConfig:
    """Shape of an MLP speculator. `hidden_size` and `vocab_size` are the target's."""

    hidden_size: int
    vocab_size: int
    inner_size: int
    num_steps: int = 3  # n
    tie_weights: bool = True
    scale_input: bool = True
    base_model_name_or_path: str = ""

    def __post_init__(self):
        for name, least in (("hidden_size", 1), ("vocab_size", 2), ("inner_size", 1), ("num_steps", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"MLPSpeculatorConfig.{name} must be a whole number of at least {least}, got {value!r}"
                )


class ScaledNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-6) * weight + bias.  [..., S] -> [..., S]"""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return unit_rms(x) * self.weight + self.bias


def unit_rms(x):
    """x / sqrt(mean(x^2) + 1e-6) over the last axis, computed in fp32 or wider."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPSILON)).to(x.dtype)


class MLPSpeculator(Head):
    """n steps from the target's last hidden state. Tied modules exist once: parameters have the names of tied files."""

    epsilon = _EPSILON

    def __init__(self, config):
        super().__init__(config)
        steps, inner = config.num_steps, config.inner_size
        own = 1 if config.tie_weights else steps
        sizes = ([config.hidden_size] + [inner] * (steps - 1))[: own + config.tie_weights]
        self.emb = nn.ModuleList(nn.Embedding(config.vocab_size, inner) for _ in range(own))
        self.proj = nn.ModuleList(nn.Linear(size, inner, bias=False) for size in sizes)
        self.ln = nn.ModuleList(ScaledNorm(inner) for _ in range(own))
        self.head = nn.ModuleList(nn.Linear(inner, config.vocab_size, bias=False) for _ in range(own))
        for module in (*self.emb, *self.proj, *self.head):
            nn.init.normal_(module.weight, std=inner**-0.5)
        self.state_weight = 0.5 ** (0.5 / steps)  # sw
        self.token_weight = math.sqrt((1 - self.state_weight**2) * inner / 2)  # ew

    @property
    def num_speculative_tokens(self):
        return self.config.num_steps

    @property
    def max_speculative_tokens(self):
        return self.config.num_steps

    def start(self, features):
        """The state before step 0.  [..., H] -> [..., H]"""
        return unit_rms(features) * 0.5**0.5 if self.config.scale_input else features

    def step(self, state, tokens, depth):
        """The state after one more token.  [..., H] at depth 0, else [..., S]; tokens [...] integers  ->  [..., S]"""
        mixed = self._of(self.proj, depth)(state)
        mixed = mixed + self._of(self.emb, depth)(tokens) * (self.token_weight / self.state_weight)
        return F.gelu(self._of(self.ln, depth)(mixed))

    def logits(self, state, depth):
        """Prediction of step `depth` from the state that it left.  [..., S] -> [..., V]"""
        return self._of(self.head, depth)(state)

    def modules_of(self, depth):
        """A step's embedding, projection, norm and lm_head."""
        return tuple(self._of(modules, depth) for modules in (self.emb, self.proj, self.ln, self.head))

    def forward(self, features, tokens):
        """Predictions of all steps over given text, and their label offsets.

        features [..., H]; tokens [..., n]: those at t + 1 to t + n of every position t  ->  (n tensors [..., V], n offsets)
        """
        state, found = self.start(features), []
        for depth in range(self.config.num_steps):
            state = self.step(state, tokens[..., depth], depth)
            found.append(self.logits(state, depth))
        return found, self.label_offsets

    def predict(self, features, input_ids, position_ids, document_ids, lm_head_weight=None, num_steps=None):
        """Each step reads the previous state and the text's next token: step k of the root at t reads x_{t+1+k}.

        See Head.predict.
        """
        count = num_steps or self.num_speculative_tokens
        tokens = next_tokens(input_ids, count).flatten(0, 1)  # [M, K]
        state, states = self.start(features.flatten(0, 1).to(self.trained_dtype)), []
        for depth in range(count):
            state = self.step(state, tokens[:, depth], depth)
            states.append(state)
        return Predictions(states, self.logits)

    def outputs_at(self, rows, features, tokens, position_ids, document_ids, lm_head_weight=None):
        return self(features[0, rows], tokens[0, rows])[0]

    def draft_bytes(self, lm_head_bytes):
        own = bytes_of(self.ln[0], self.head[0])
        return {"first": own + bytes_of(self.proj[0]), "level": own + bytes_of(self.proj[-1])}

    def _of(self, modules, depth):
        """The module of a step: its own, or the last one where steps share it."""
        return modules[min(depth, len(modules) - 1)]
