"""What the engine asks of everything that drafts.

A drafter proposes the tokens of a draft tree from what a request's seat keeps from step to step: by default the target's last
hidden state at the last committed token. A drafter may keep a state of its own there instead (`state_shape`), and keys and values
of its own (`kv_shape`), in pages of the same numbers as the target's.

Letters: B requests, N nodes, D the tree's depth, F width of the target's feature, S width of the state, V vocabulary.
"""

from ..draft import Draft


def no_draft(batch, tree, processor=None):
    """The root alone: `propose` of a step that drafts nothing."""
    return Draft(batch.root[:, None], tree)


class Drafter:
    """Defaults of a drafter that keeps the target's last hidden state and nothing else.

    streams: layers of the target whose input's residual stream it reads, ascending; none: the last hidden state
    state_shape: (width, dtype) of a state of its own; None: it keeps the target's last hidden state
    kv_shape: (layers, key heads, head dimension, dtype) of keys and values of its own; None: it has none
    lookahead: how many tokens after a page its own keys and values in that page depend on
    extra_places: positions after those of the tree's nodes that it writes keys and values to
    autoregressive: whether a token's distribution depends on the tokens drafted before it
    num_speculative_tokens: how deep it drafts
    """

    streams = ()
    autoregressive = False
    state_shape = None
    kv_shape = None
    lookahead = 0
    extra_places = 0

    @property
    def keeps_state(self):
        """Whether it keeps a state of its own in a request's row."""
        return self.state_shape is not None

    def attach(self, kv):
        """Use this cache [layers, 2, rows, head dimension]; only where kv_shape is given."""

    def propose(self, batch, tree, processor=None):
        """Tokens of all nodes, and their distributions where the verifier compares them.

        batch: BatchRows; tree: TreeOnDevice; processor: None, or what changes logits [K, B, V] of nodes at depths [K] as the
        requests ask (target_scores.draft_scores)  ->  Draft
        """
        raise NotImplementedError

    def candidates(self, batch, widths):
        """The best tokens after the root and after the draft's own first choices; the `widths` of narrower depths are filled up.

        batch: BatchRows; widths: how many per depth  ->  int64 [B, len(widths), greatest width]
        """
        raise NotImplementedError

    # --- only where state_shape is given ---

    def advance(self, batch, feature, emitted, path, num_accepted):
        """After a step: the state after its newest token, and keys and values of what it emitted.

        batch: BatchRows as before the step; feature [B N, F] of its nodes; emitted [B, D + 2]: how many tokens, they; path
        [B, D + 1]; num_accepted [B]  ->  [B, S]
        """
        raise NotImplementedError

    def prompt_rows(self, chunk):
        """Which of a chunk's rows (scheduler.Chunk) it computes on its own.  -> (how many, from the first; the tokens they read)"""
        raise NotImplementedError

    def fill(self, forward_pass, feature):
        """Compute keys and values of prompt rows.  forward_pass: ForwardPass of M rows; feature [M, F] of the target there"""
        raise NotImplementedError


class NoDrafter(Drafter):
    """Plain decoding: it drafts nothing."""

    num_speculative_tokens = 0
    propose = staticmethod(no_draft)
