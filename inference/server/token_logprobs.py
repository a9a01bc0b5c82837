"""Log-probabilities in the shapes of OpenAI's answers. No torch."""

LEAST = -9999.0  # JSON has no minus infinity; the same number as vLLM's


class TokenTexts:
    """The text of single tokens, remembered.  as_ids: name them "token_id:N" instead, which tells all tokens apart"""

    def __init__(self, tokenizer):
        self._tokenizer, self._known = tokenizer, {}

    def of(self, token, as_ids=False):
        if as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        if token not in self._known:
            self._known[token] = self._tokenizer.decode([token])
        return self._known[token]


def finite(logprob):
    return max(logprob, LEAST)


class CompletionLogprobs:
    """`logprobs` of the choices of /v1/completions: four lists, one entry per token. Offsets go on from delta to delta."""

    def __init__(self, texts, as_ids):
        self._texts, self._as_ids, self._offset = texts, as_ids, 0

    def of(self, token_ids, entries):
        """entries: {token id: Logprob} per token, None for the first one of a prompt"""
        tokens, values, tops, offsets = [], [], [], []
        for token, entry in zip(token_ids, entries):
            name = self._texts.of(token, self._as_ids)
            tokens.append(name)
            offsets.append(self._offset)
            self._offset += len(self._texts.of(token))
            values.append(finite(entry[token].logprob) if entry else None)
            # Two tokens may have one text, such as half a character: the likelier one is told.
            top = {}
            for other, found in entry.items() if entry else ():
                text = self._texts.of(other, self._as_ids)
                top[text] = max(finite(found.logprob), top.get(text, LEAST))
            tops.append(top if entry else None)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(token_ids, entries, count, texts, as_ids):
    """`logprobs` of a choice of /v1/chat/completions.  count: top_logprobs"""

    def named(token, found):
        text = texts.of(token, as_ids)
        return {"token": text, "logprob": finite(found.logprob), "bytes": list(text.encode("utf-8", "replace"))}

    content = []
    for token, entry in zip(token_ids, entries):
        best = sorted(((found.rank, other) for other, found in entry.items() if found.rank <= count))
        top = [named(other, entry[other]) for _, other in best]
        content.append({**named(token, entry[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(entries, texts):
    """`prompt_logprobs` in vLLM's shape: per token None or {token id: {logprob, rank, decoded_token}}."""

    def told(token, found):
        return {"logprob": finite(found.logprob), "rank": found.rank, "decoded_token": texts.of(token)}

    return [entry and {str(token): told(token, found) for token, found in entry.items()} for entry in entries]
