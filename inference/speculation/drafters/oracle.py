"""A drafter for tests of losslessness: it knows the outputs and drafts wrong tokens at a given rate.

Accepted paths of every length and at every place in a tree occur, whatever the target; a head would mostly be right in easy places.
It cannot serve: it is built from outputs that plain decoding made.

Letters: R known requests, T their longest output, B requests in a batch, N nodes.
"""

import torch

from ..draft import Draft
from .drafter import Drafter


def _mix(x):
    """The finaliser of splitmix64.  int64 -> int64"""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


class OracleDrafter(Drafter):
    """Below each node one child carries the known output's token with probability `rate`; all other children are wrong.

    known: R lists of output tokens; prompt_lengths: R; request r is recognised by its seed, which must be r.
    """

    def __init__(self, known, prompt_lengths, rate, vocab_size, device):
        longest = max(map(len, known))
        padded = [tokens + [0] * (longest - len(tokens)) for tokens in known]
        self.known = torch.tensor(padded, device=device)
        self.prompt_lengths = torch.tensor(prompt_lengths, device=device)
        self.rate, self.vocab_size, self.device = rate, vocab_size, device
        self._siblings = {}

    def siblings(self, tree):
        """(place among its siblings, number of them) of every node, [N] each."""
        if tree.tree not in self._siblings:
            parents = tree.tree.parents
            place = [parents[:n].count(parent) for n, parent in enumerate(parents)]
            number = [parents.count(parent) for parent in parents]
            self._siblings[tree.tree] = [torch.tensor(x, device=self.device) for x in (place, number)]
        return self._siblings[tree.tree]

    def propose(self, batch, tree, processor=None):
        """Tokens of all nodes, without distributions: see Drafter.propose; processor is not used."""
        place, number = self.siblings(tree)
        request = batch.seed.clamp(0, len(self.known) - 1)
        position = batch.committed[:, None] + tree.depths  # [B, N]
        index = position - self.prompt_lengths[request][:, None]
        right = self.known[request].gather(1, index.clamp(0, self.known.shape[1] - 1))
        word = _mix(_mix(batch.seed + (batch.committed << 20))[:, None] + tree.parents)  # one per group of siblings
        lucky = (word >> 40 & 0xFFFF) < int(self.rate * 0x10000)
        told = lucky & ((word >> 20 & 0xFFFF) % number == place)
        # Siblings' wrong tokens differ from each other and from the right one.
        wrong = (right + 1 + place + number * ((word & 0xFFFF) % max(self.vocab_size // 128, 1))) % self.vocab_size
        tokens = torch.where(told, right, wrong)
        return Draft(torch.cat((batch.root[:, None], tokens[:, 1:]), 1), tree)
