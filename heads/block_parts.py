"""Optional parts of block drafters (block.py): what members of the family add to DFlash. Each starts without effect.

DSpark's edge and confidence:

    U(b) + W2[b] W1[a]                              a the token before, b a slot's token, U the logits by the slot's state alone
    sigmoid(proj [h ; W1[a]])                       how likely the target accepts the slot's token; h the slot's normed state

DFlash2's selector scores pairs of a token and the one before it, and its convolution mixes a slot with those before it:

    S(a, b) = U(b) + sum_r A[a]_r (P h)_r B[b]_r    for the top_k best b by U; a head drafts no others
    y_t = sum over j of (base_j + d_{t,j}) x_{t-j}  per channel; x before the block's first slot is 0

A layer convolves what goes into its attention and what comes out, and the same for its MLP. The corrections d of both are linear
in what goes in; channels of a group share one.

The names are the files' (z-lab's for DFlash2, DeepSpec's for DSpark); formulas of DFlash2 after z-lab's, NVIDIA's and vLLM's code.
Not here: gated and recurrent edges.

Letters: M slots, S slots of a block, H hidden size, V vocabulary, VD the draft's, r rank, C candidates, J taps, G groups.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.block_convolution import block_convolution_reference


class Edge(nn.Module):
    """DSpark's correction of a slot's logits by the token before: W2 W1[token]. It starts at zero: without effect."""

    def __init__(self, config):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.edge_rank)
        self.markov_w2 = nn.Linear(config.edge_rank, config.num_scores, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=config.edge_rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def before(self, tokens):
        """What the correction reads of the tokens before: rows of W1.  [M] -> [M, r]"""
        return self.markov_w1(tokens)

    def forward(self, logits, states, rows):
        """logits [M, VD], rows of `before` [M, r]  ->  corrected [M, VD]"""
        return logits + self.markov_w2(rows).to(logits.dtype)


class Confidence(nn.Module):
    """How sure the head is that the target accepts a slot's token."""

    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.edge_rank * config.confidence_sees_token, 1)


class Selector(nn.Module):
    """DFlash2's choice among a slot's best tokens by the token before. B starts at zero: without effect on their scores."""

    def __init__(self, config):
        super().__init__()
        rank, self.top_k = config.selector_rank, config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        nn.init.normal_(self.predecessor_codebook, std=rank**-0.5)

    def before(self, tokens):
        """What the choice reads of the tokens before: rows of A.  [M] -> [M, r]"""
        return F.embedding(tokens, self.predecessor_codebook)

    def candidates(self, logits):
        """The tokens to choose among.  logits [M, V]  ->  [M, C]"""
        return logits.detach().topk(self.top_k).indices

    def scores(self, unary, candidates, states, rows):
        """S of candidates.  unary [M, C]: their U; candidates [M, C], states [M, H], rows of `before` [M, r]  ->  [M, C]"""
        gate = rows * self.hidden_projection(states)
        pairs = torch.einsum("mr,mcr->mc", gate, F.embedding(candidates, self.successor_codebook))
        return unary + pairs.to(unary.dtype)

    def forward(self, logits, states, rows):
        """S of the candidates, minus infinity for other tokens.  logits [M, V], states [M, H], rows of `before`  ->  [M, V]"""
        return self._scattered(torch.full_like(logits, -torch.inf), logits, states, rows)

    def whole(self, logits, states, rows):
        """As `forward`, but other tokens keep their U: finite, for losses and checks."""
        return self._scattered(logits, logits, states, rows)

    def _scattered(self, others, logits, states, rows):
        candidates = self.candidates(logits)
        return others.scatter(1, candidates, self.scores(logits.gather(1, candidates), candidates, states, rows))


class Convolution(nn.Module):
    """DFlash2's convolutions around a sublayer, over the slots of a block. It starts as the identity."""

    def __init__(self, config):
        super().__init__()
        self.block_size, taps, size = config.block_size, config.conv_kernel_size, config.hidden_size
        base = torch.zeros(2, taps, size)  # of what goes in, of what comes out
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(size, 2 * taps * size // config.conv_group_size, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def corrections(self, projected):
        """Of what goes in, and of what comes out.  projected [..., 2 J G]: kernel_projection's output  ->  two [..., J, G]"""
        return projected.unflatten(-1, (*self.base_kernel.shape[:2], -1)).unbind(-3)

    def convolve(self, x, base, corrections):
        """x [..., R S, H]: rows of whole blocks; base [J, H], corrections [..., R S, J, G]  ->  as x"""
        return block_convolution_reference(x, base, corrections, self.block_size)

    def around(self, sublayer, x):
        """sublayer(x) with both convolutions.  x [..., R S, H]  ->  as x"""
        ingoing, outgoing = self.corrections(self.kernel_projection(x))
        found = sublayer(self.convolve(x, self.base_kernel[0], ingoing))
        return self.convolve(found, self.base_kernel[1], outgoing)
