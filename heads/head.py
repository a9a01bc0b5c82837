"""Head, the protocol of every head: the code that trains, drafts with or exports heads uses nothing else.

A family is a module heads/<key>.py with a frozen config and a subclass of Head, and its line in heads/families.py. A head knows
nothing of caches, trees, schedulers, optimisers or file formats.

Alignment: depth k (from 0) of the root at t predicts x_{t+2+k}; the target itself gives x_{t+1}.

Letters: B rows, T tokens per row, M = B T, H hidden size of the target, A aux layers, S width of a state, V vocabulary, K depths.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

FINAL = ("final",)


@dataclass(frozen=True)
class Predictions:
    """A head's predictions over packed rows, up to its last product with the vocabulary.

    states: K tensors [M, S]; row t of states[k] predicts x_{t+2+k}. They may require gradients, and get them once.
    logits: (rows [C, S] of states[k], k) -> [C, V]. draft_ids: int64 [V], the tokens of a draft vocabulary; None: the target's.
    same_logits: logits is one function for all k, and takes rows of several depths together.
    whole_logits: as logits, of a head whose logits are minus infinity but for a few tokens: finite ones. None: logits are.
    """

    states: list
    logits: Callable
    draft_ids: torch.Tensor | None = None
    same_logits: bool = False
    whole_logits: Callable | None = None

    def groups(self, vocab_size):
        """The depths in groups whose logits are made at once: they take no more memory than the target's, vocab_size wide."""
        at_once = vocab_size // len(self.draft_ids) if self.same_logits and self.draft_ids is not None else 1
        depths = range(len(self.states))
        return [depths[first : first + at_once] for first in depths[::at_once]]


class Head(nn.Module):
    """A module that predicts several tokens ahead from features of the target.

    config: frozen dataclass with vocab_size, hidden_size, base_model_name_or_path.
    features: what it reads of the target: ("final",), the last hidden state after the final norm; or ids of layers, low to high,
        for the residual streams entering them.
    autoregressive: whether the distribution of a token depends on the tokens drafted before it.
    uses_target_lm_head: whether its logits are the target's lm_head applied to its states.
    draft_token_ids: int64 [VD], the target's ids of a draft vocabulary; None: the whole vocabulary.
    max_candidates: the most tokens after a node that it has scores for; None: all of them.
    adapter: fingerprint of the target's adapter that it was trained together with; "" for none.
    checkpoint_steps: whether each step of `predict` is computed again in the backward pass, instead of kept (`run_step`).
    steps_in_a_pass: how many such steps there are, whatever the depths; None: one for each depth.
    needs_embedding: whether it waits for `take_embedding`; embedding_is_targets: whether its table is the target's own.
    """

    features = FINAL
    autoregressive = True
    uses_target_lm_head = False
    draft_token_ids = max_candidates = None
    adapter = ""
    checkpoint_steps = False
    steps_in_a_pass = None
    needs_embedding = embedding_is_targets = False

    def __init__(self, config):
        super().__init__()
        self.config = config

    @property
    def num_speculative_tokens(self):
        """Number of tokens that it drafts by default."""
        return self.config.num_speculative_tokens

    @property
    def max_speculative_tokens(self):
        """The most tokens ahead that it can draft; None: no limit."""
        return None

    @property
    def label_offsets(self):
        """Depth k at position t predicts the token at t + label_offsets[k]."""
        return tuple(2 + k for k in range(self.num_speculative_tokens))

    @property
    def aux_layers(self):
        """Ids of the layers whose entering residual streams it reads; () where it reads the last hidden state."""
        return () if self.features == FINAL else self.features

    @property
    def target_hidden_size(self):
        """H of the target that it was made for."""
        return self.config.hidden_size

    @property
    def feature_size(self):
        """Width of the feature at one position."""
        return self.target_hidden_size

    @property
    def num_checked_tokens(self):
        """Number of depths that checks of a head compare with `outputs_at`."""
        return self.num_speculative_tokens

    def initialize_from_target(self, lm_head_weight, embedding):
        """Start from the target's lm_head and its embedding, [V, H] each. ValueError where the head was made for another target."""

    def take_embedding(self, weight):
        """Use the target's embedding table [V, H] itself, without a copy. ValueError if it is of another shape."""

    def take_depth(self, num_layers):
        """Fill in what the head's file left open, from the target's number of layers."""

    def mismatches(self, text_config):
        """Differences between the head and a target, given by its transformers text config: a list of phrases, empty if it fits."""
        pairs = (
            ("hidden size", self.target_hidden_size, text_config.hidden_size),
            ("vocabulary", self.config.vocab_size, text_config.vocab_size),
        )
        return [f"{name} {ours}, the target has {theirs}" for name, ours, theirs in pairs if ours != theirs]

    def predict(self, features, input_ids, position_ids, document_ids, lm_head_weight=None, num_steps=None):
        """Predictions over packed rows, as in training: the head reads the text's tokens and its own states.

        features [B, T, H], or [B, T, A H] of its aux layers side by side; input_ids, position_ids, document_ids [B, T];
        lm_head_weight [V, H]: the target's, where it is used; num_steps: how many depths, None: num_speculative_tokens.
        """
        raise NotImplementedError

    def outputs_at(self, rows, features, tokens, position_ids, document_ids, lm_head_weight=None):
        """The head's (whole) logits over given text at some positions, depth by depth: for checks against other code.

        rows: the positions [R]; features [1, T, .], tokens [1, T, K] at t + 1 to t + K, position_ids and document_ids [1, T]
        ->  K tensors [R, V]; or states [R, S] for a head that uses the target's lm_head and is given none
        """
        raise NotImplementedError

    def draft_bytes(self, lm_head_bytes):
        """Bytes of weights that drafting reads, each weight once, without the few rows of an embedding: a lower bound on its time.

        lm_head_bytes: of the target's lm_head, where it is used  ->  {"first": after the root, "level": each further depth,
        "advance": the pass over a step's emitted tokens}, only the parts that the head has. Works on any device, meta too.
        """
        raise NotImplementedError

    def draft_key_bytes(self, depth):
        """Bytes of its own keys and values that drafting `depth` tokens reads for each committed token, all passes of a step."""
        return 0

    def run_step(self, step, *arguments):
        """step(*arguments), of tensors, masks and numbers alone. With `checkpoint_steps` autograd keeps only the arguments.

        Gradients are the same bit by bit; the step must draw no random numbers.
        """
        if not self.checkpoint_steps:
            return step(*arguments)
        return checkpoint(step, *arguments, use_reentrant=False, preserve_rng_state=False)

    @property
    def trained_dtype(self):
        """The dtype of the trained weights. A frozen embedding may have the target's dtype instead."""
        return next(parameter for parameter in self.parameters() if parameter.requires_grad).dtype


def bytes_of(*modules):
    """Bytes of all parameters."""
    return sum(parameter.nbytes for module in modules for parameter in module.parameters())


def key_bytes(config, weight):
    """Bytes of one layer's keys and values of a token, in the dtype of `weight`."""
    return 2 * config.num_key_value_heads * config.head_dim * weight.element_size()


def next_tokens(input_ids, count):
    """The tokens at t + 1 to t + count of every position t.  [B, T] -> [B, T, count]

    Past the row's end the token is 0, past a document's end the next document's. No label depends on either.
    """
    padded = F.pad(input_ids, (0, count))
    return padded[:, 1:].unfold(1, count, 1)


def cast_lm_head(lm_head_weight, dtype):
    """The target's lm_head in `dtype`, or in autocast's dtype where autocast is on. Converted here, once.

    Autocast caches converted copies of trained parameters only; it would convert a frozen one again for every chunk.
    """
    kind = lm_head_weight.device.type
    return lm_head_weight.to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype)
