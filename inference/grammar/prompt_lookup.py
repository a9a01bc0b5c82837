"""Prompt lookup on the host: what followed the newest tokens where they last occurred. No torch.

The drafter "ngram" does the same on the device, where no grammar can look at what it drafts.
"""

import copy
from collections import ChainMap

SHORTEST, LONGEST = 2, 3  # tokens that must match
MOST_INDEXED = 2048  # tokens of the prompt's end; an index of all would hold up the step in which a long prompt comes


class PromptLookup:
    """Of the tokens of a prompt, and of those that are appended."""

    def __init__(self, prompt_token_ids=()):
        self._tokens, self._index = [], ChainMap()  # index: {n-gram: place of what followed it the last time}
        for token in prompt_token_ids[-MOST_INDEXED:]:
            self.append(token)

    def followed_by(self, token_ids):
        """Another one, that goes on by these tokens. It shares the index of those before, 461 KB of a long prompt."""
        other = copy.copy(self)
        other._tokens, other._index = list(self._tokens), self._index.new_child()
        for token in token_ids:
            other.append(token)
        return other

    def append(self, token):
        end = len(self._tokens)
        for n in range(SHORTEST, min(LONGEST, end) + 1):
            self._index[tuple(self._tokens[end - n :])] = end
        self._tokens.append(token)

    def after(self, further, most):
        """At most so many tokens that may follow the known ones and `further` ones; the longest match counts."""
        newest = [*self._tokens[-LONGEST:], *further][-LONGEST:]
        for n in range(len(newest), SHORTEST - 1, -1):
            place = self._index.get(tuple(newest[-n:]))
            if place is not None:
                return self._tokens[place : place + most]
        return []
