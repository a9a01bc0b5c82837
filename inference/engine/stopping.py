"""Where an output ends, and its text. Tokens are looked at one by one, so speculation ends an output where plain decoding does."""

import itertools
import re
from functools import cached_property

MARGIN = 16
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # name of a byte where a run of bytes is decoded as a whole: Llama 2, Mistral
CLEANED = 8  # more characters than transformers' clean_up_tokenization changes together, such as " n ' t" to "n't"


def stop_ids(params, eos_token_ids):
    """Tokens that end an output with these SamplingParams."""
    return set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))


def forbidden_early(params, eos_token_ids, vocab_size):
    """Ids that min_tokens forbids. As in vLLM they include EOS, ignored or not. Ids that the model cannot emit are left out."""
    return {token for token in {*params.stop_token_ids, *eos_token_ids} if token < vocab_size}


class StopChecker:
    """Checks a request after every appended token: EOS, stop tokens, stop strings.

    Called with the request; returns the token id or string that stopped it, or None to go on.
    """

    def __init__(self, tokenizer, eos_token_ids, params):
        self.tokenizer, self.params = tokenizer, params
        self.stop_ids = stop_ids(params, eos_token_ids)
        self._enough = max((len(stop.encode()) for stop in params.stop), default=0) + MARGIN  # as if tokens were bytes
        self._early_length = None  # length of the text of the first min_tokens tokens, once they are there

    def __call__(self, request):
        token = request.output_token_ids[-1]
        if len(request.output_token_ids) <= self.params.min_tokens:
            return None
        if token in self.stop_ids:
            return token
        if self.params.stop and self._may_have_stopped(request.output_token_ids):
            found = self.find(request)
            if found:
                return found[1]
        return None

    def _may_have_stopped(self, token_ids):
        """Whether the text's end may hold a stop string. Decoding the whole text for every token would take quadratic time.

        The text of tokens decoded without those before them may begin differently (a space, half a character), hence the margin.
        """
        count = self._enough
        while True:
            end = self.decode(token_ids[-count:])
            if count >= len(token_ids) or (len(end) >= self._enough and not end.startswith("�")):
                return any(stop in end for stop in self.params.stop)
            count *= 2  # special tokens have no text; and half a character may spoil a whole run of byte tokens

    def find(self, request):
        """(index, string) of the stop string that ends the output, or None."""
        if self._early_length is None:
            self._early_length = len(self.decode(request.output_token_ids[: self.params.min_tokens]))
        return find_stop(self.text(request), self.params.stop, self._early_length)

    def text(self, request):
        """The output's text so far, stop strings included."""
        return self.decode(request.output_token_ids)

    def decode(self, token_ids):
        params = self.params
        if self.tokenizer is None or not params.detokenize:
            return ""
        text = self._decode(token_ids, skip_special_tokens=params.skip_special_tokens)
        if params.skip_special_tokens or params.spaces_between_special_tokens:
            return text
        return join_special(text, token_ids, self.tokenizer)

    @cached_property
    def _decode(self):
        """tokenizer.decode, or its backend's where transformers adds only a look at every id, which takes most of the time."""
        from transformers import (
            PreTrainedTokenizerFast,
        )  # takes a second, and not all who import this file have a tokenizer

        names = ("decode", "_decode", "clean_up_tokenization")
        methods, usual = [
            [getattr(one, name, None) for name in names] for one in (self.tokenizer, PreTrainedTokenizerFast)
        ]
        passes_on = [getattr(one, "__func__", one) for one in methods] == usual and not self.cleans_up
        return self.tokenizer.backend_tokenizer.decode if passes_on else self.tokenizer.decode

    def may_change(self, token):
        """Whether the next token may change what this one makes of the text's end: a byte of a run, or no text of its own."""
        return not self.decode([token]) or BYTE.fullmatch(self.tokenizer.convert_ids_to_tokens(token)) is not None

    @cached_property
    def cleans_up(self):
        """Whether decoding takes spaces before marks out of the text: clean_up_tokenization_spaces, which BPE tokenizers ignore."""
        if not getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            return False
        return " ." not in self.tokenizer.decode(self.tokenizer("x .", add_special_tokens=False)["input_ids"])


def join_special(text, token_ids, tokenizer):
    """The text of these tokens, special ones included, without the spaces between special tokens that stand side by side."""
    added, end = tokenizer.added_tokens_decoder, 0
    for special, run in itertools.groupby(token_ids, lambda token: token in added):
        names = [added[token].content for token in run] if special else []
        start = text.find(" ".join(names), end) if names else -1
        if start >= 0:
            end = start + len("".join(names))
            text = text[:start] + "".join(names) + text[start + len(" ".join(names)) :]
    return text


class GrowingText:
    """The text of a growing output, without an end that may change. Each call costs time for the new tokens only, not for all.

    It is the text of all tokens up to the last that ends a run of bytes; half a character at its end is not cut: stable_length.
    """

    def __init__(self, checker):
        self._checker = checker
        self._num_seen, self._num_settled, self._text = 0, 0, ""  # numbers of tokens, and the text of the settled ones
        self._num_known, self._known = 0, ""  # a number of tokens, and their text
        # The last of these tokens decoded alone, and their number: text begins differently without the tokens before it.
        self._overlap, self._num_overlap = "", 0

    def of(self, token_ids):
        """The text of these token ids, which begin with those of the previous call."""
        ends = range(len(token_ids), self._num_seen, -1)
        settled = next((end for end in ends if not self._checker.may_change(token_ids[end - 1])), self._num_settled)
        self._num_seen = len(token_ids)
        if settled > self._num_settled:
            self._num_settled, self._text = settled, self._decode(token_ids, settled)
        if not self._checker.cleans_up:
            return self._text
        space = self._text.find(" ", max(len(self._text) - CLEANED, 0))
        return self._text if space < 0 else self._text[:space]

    def _decode(self, token_ids, end):
        """The text of token_ids[:end]."""
        window = self._checker.decode(token_ids[self._num_known - self._num_overlap : end])
        if window.startswith(self._overlap):
            text = self._known + window[len(self._overlap) :]
        else:
            text = self._checker.decode(token_ids[:end])
        if end >= self._num_known + MARGIN:
            # A character has up to four tokens, so one of these counts begins at a character.
            for count in range(MARGIN, MARGIN - 4, -1):
                overlap = self._checker.decode(token_ids[end - count : end])
                # With half a character in it the other half would be lost; an empty overlap shows no start.
                if overlap and "�" not in overlap and text.endswith(overlap):
                    self._num_known, self._known = end, text
                    self._overlap, self._num_overlap = overlap, count
                    break
        return text


def find_stop(text, stops, start=0):
    """(index, string) of the stop string that occurs first in `text` among those that end after text[:start], or None."""
    found = [(text.find(stop, max(start + 1 - len(stop), 0)), stop) for stop in stops]
    return min(((index, stop) for index, stop in found if index >= 0), default=None)


def final_text(request):
    """The finished output's text: without special tokens, and without the stop string or stop token that ended it.

    With include_stop_str_in_output it ends with the stop string, or with the stop token's text unless that token is special.
    """
    checker, reason = request.stop_checker, request.stop_reason if request.finish_reason == "stop" else None
    kept = checker.params.include_stop_str_in_output
    if isinstance(reason, str):
        index, stop = checker.find(request)
        return checker.text(request)[: index + (len(stop) if kept else 0)]
    if reason is not None and not kept:
        return checker.decode(request.output_token_ids[:-1])
    return checker.text(request)


def stable_length(text, stops):
    """Length of a growing output's text that is final. The rest may still change (half a character) or be cut (a stop string)."""
    end = len(text)
    while end and text[end - 1] == "�":
        end -= 1
    held = max((k for stop in stops for k in range(1, len(stop)) if text[:end].endswith(stop[:k])), default=0)
    return end - held
