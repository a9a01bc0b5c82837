"""Check the tokens that a request names before any work, and turn bad words into token sequences, as vLLM does."""

from ..kernels.sampling.process_logits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS


def bad_word_sequences(words, tokenizer):
    """Token sequences that the output must not complete.  strings -> tuple of tuples of token ids

    Each word is tokenised without a leading space; also with one, if that gives equally many tokens and another first token (so a
    word is found at the beginning of a text and in the middle). Raises ValueError for more or longer sequences than the engine's
    table takes.
    """
    sequences = []
    for word in words:
        bare, spaced = (
            tuple(tokenizer(prefix + word.lstrip(), add_special_tokens=False)["input_ids"]) for prefix in ("", " ")
        )
        if not bare:
            raise ValueError(f"bad_words holds {word!r}, which the tokenizer makes no token of")
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
        if len(bare) > MAX_BAD_WORD_TOKENS:
            raise ValueError(
                f"bad_words holds {word!r}, which is {len(bare)} tokens long; at most {MAX_BAD_WORD_TOKENS} can be forbidden"
            )
    several = sum(len(sequence) > 1 for sequence in sequences)
    if several > MAX_BAD_WORDS:
        raise ValueError(
            f"bad_words makes {several} sequences of more than one token (with a space before and without); at most "
            f"{MAX_BAD_WORDS} can be forbidden: give fewer"
        )
    return tuple(sequences)


def check_tokens(params, bad_words, stop_ids, vocab_size, number):
    """ValueError if prompt `number` names ids outside the vocabulary, or if nothing is left of its allowed_token_ids.

    bad_words: bad_word_sequences of the params; stop_ids: ids that min_tokens forbids.
    """
    named = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": [token for token, _ in params.logit_bias],
        "bad_words": [token for word in bad_words for token in word],
    }
    for name, tokens in named.items():
        if max(tokens, default=0) >= vocab_size:
            raise ValueError(f"{name} of prompt {number} holds {max(tokens)}; the vocabulary has {vocab_size} tokens")
    forbidden = {word[0] for word in bad_words if len(word) == 1} | (stop_ids if params.min_tokens else set())
    if params.allowed_token_ids is not None and not set(params.allowed_token_ids) - forbidden:
        raise ValueError(
            f"allowed_token_ids {list(params.allowed_token_ids)!r:.80} of prompt {number} leaves nothing to draw: bad_words "
            "and min_tokens forbid all of it"
        )
