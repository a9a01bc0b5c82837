"""Where an output ends, and its text. Tokens are looked at one by one, so speculation ends an output where plain decoding does."""


class StopChecker:
    """Checks a request after every appended token: EOS, stop tokens, stop strings.

    Called with the request; returns None to go on, else what stopped it (a token id or a string).
    """

    def __init__(self, tokenizer, eos_token_ids, params):
        self.tokenizer, self.params = tokenizer, params
        self.stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))

    def __call__(self, request):
        token = request.output_token_ids[-1]
        if len(request.output_token_ids) <= self.params.min_tokens:
            return None
        if token in self.stop_ids:
            return token
        if self.params.stop:
            found = find_stop(self.text(request), self.params.stop)
            if found:
                return found[1]
        return None

    def text(self, request):
        """The output's text so far, stop strings included."""
        return self.tokenizer.decode(request.output_token_ids, skip_special_tokens=True) if self.tokenizer else ""


def find_stop(text, stops):
    """(index, string) of the stop string that occurs first in `text`, or None."""
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    return min(found) if found else None


def final_text(request):
    """The finished output's text: without special tokens, cut before the stop string that ended it."""
    text = request.stop_checker.text(request)
    return text.split(request.stop_reason, 1)[0] if isinstance(request.stop_reason, str) else text


def stable_length(text, stops):
    """How much of a growing output's text can be shown: the rest may still change (half a character) or be cut (a stop string)."""
    end = len(text)
    while end and text[end - 1] == "�":
        end -= 1
    held = max((k for stop in stops for k in range(1, len(stop)) if text[:end].endswith(stop[:k])), default=0)
    return end - held
