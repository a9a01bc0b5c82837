"""Drafting with a smaller model of the same vocabulary, chain or tree (arXiv 2211.17192; vLLM's method "draft_model").

The model runs on the engine's decoder, with its own keys and values. With the target itself as the draft every token is accepted.
"""

from .own_cache import OwnCacheDrafter


class DraftModelDrafter(OwnCacheDrafter):
    """decoder: the draft model's Decoder; num_speculative_tokens: depth of drafts; sampling: a way of draft_sampling.py."""

    shift = 1  # a token's keys stand at its own position
    extra_places = 1

    def __init__(self, decoder, num_speculative_tokens, sampling="shared_noise"):
        super().__init__(sampling)
        self.decoder, self.num_speculative_tokens = decoder, num_speculative_tokens
        self.kv_shape, self.state_shape = decoder.kv_shape, (decoder.hidden_size, decoder.dtype)

    def run(self, forward_pass, source, from_target):
        hidden = self.decoder.forward(forward_pass, self.kv)[0]
        return hidden, hidden

    def logits(self, normed):
        return self.decoder.logits(normed)

    def prompt_rows(self, chunk):
        return chunk.count, chunk.request.known_token_ids[chunk.start : chunk.start + chunk.count]
