"""Matcher: the place of one output in its grammar. No torch.

The tokens of a prefix alone decide the mask after it. `look_ahead` computes it for the next token, and along the tokens that the
grammar forces.

Letters: K masks, W words of 32 bits.
"""

import numpy as np

from .library import one_line

ENDED, BROKEN = "ended", "broken"


class Matcher:
    """compiled: an LLMatcher of its own, at the start of the grammar; most_drafts: the most forced tokens to look for.

    drafts: forced tokens that follow, at most most_drafts; masks: int32 [len(drafts) + 1, W], bit t of which allows the token t
    after the output, after the first of the drafts, ...; error: what the library says after BROKEN. Raises ValueError if the first
    mask is too much for the library's limits.
    """

    def __init__(self, compiled, most_drafts):
        self._compiled, self._most_drafts = compiled, most_drafts
        self.drafts, self.masks, self.error = [], None, None
        if self.look_ahead():
            raise ValueError(self.error)

    def accept(self, token):
        """Go on by an emitted token.  -> None, ENDED if nothing may follow, BROKEN if the library gave up"""
        if not self._compiled.consume_token(token):
            return self._broken()
        return ENDED if self._compiled.is_stopped() else None

    def look_ahead(self):
        """Compute drafts and masks for the output as it is.  -> None or BROKEN"""
        compiled, masks, drafts = self._compiled, [], []
        for token in [*self._forced()[: self._most_drafts], None]:
            masks.append(np.frombuffer(compiled.compute_bitmask(), dtype=np.int32))
            if token is None or compiled.is_error() or not compiled.try_consume_tokens([token]):
                break
            drafts.append(token)
        if drafts:
            compiled.rollback(len(drafts))
        if compiled.is_error():
            return self._broken()
        self.drafts, self.masks = drafts, np.stack(masks)
        return None

    def start_over(self, token_ids):
        """Stand after these tokens, whatever was accepted."""
        self._compiled.reset()
        self._compiled.consume_tokens(token_ids)
        self.look_ahead()

    def _forced(self):
        """Tokens that must follow."""
        return self._compiled.compute_ff_tokens() if self._most_drafts else []

    def _broken(self):
        self.error = one_line(self._compiled.get_error())
        return BROKEN
