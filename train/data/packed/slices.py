"""Pieces of a long conversation as slices of its own tokens: nothing is encoded again to see whether it fits.

Most chat templates write a piece as T[:c] + T[a:b], where T is the text of the whole: what goes with every piece, and some
exchanges. The piece is rendered and compared with that. Its tokens are those of the whole if a special token begins at c, a and b,
because a tokenizer cuts the text there before it does anything else. If either fails, there is no slice: encode the piece itself.
"""

import re
from collections.abc import Callable

from .pieces import exchanges

Text = Callable[[list[dict]], str]


class Borders:
    """Finds the special tokens of a fast tokenizer in a text and in its tokens."""

    def __init__(self, tokenizer):
        self.added = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
        cuts = {
            id
            for id, one in tokenizer.added_tokens_decoder.items()
            if one.special and not (one.lstrip or one.single_word)
        }
        self.ids, self.cuts = {*self.added.values()}, cuts
        longest_first = sorted(self.added, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def find(self, text, ids):
        """{place in the text: number of the token} of special tokens that cut the text; None if tokens and text differ."""
        written = [(match.start(), self.added[match[0]]) for match in self.pattern.finditer(text)]
        encoded = [(number, id) for number, id in enumerate(ids) if id in self.ids]
        if [id for _, id in written] != [id for _, id in encoded]:
            return None
        found = {place: number for (place, id), (number, _) in zip(written, encoded) if id in self.cuts}
        return {0: 0} | found | {len(text): len(ids)}


class Slices:
    """Of one conversation.

    messages: it; text(messages): of a document; before(messages): the text of messages that others follow; ids, supervised: of the
    whole; borders: Borders
    """

    def __init__(self, messages, text: Text, before: Text, ids, supervised, borders):
        self.messages, self.text, self.before, self.ids, self.supervised = messages, text, before, ids, supervised
        self.whole, self.head = text(messages), exchanges(messages)[0]
        self.borders = borders.find(self.whole, ids)
        self._places = {}  # of a message: where it begins in the whole text

    def of(self, piece):
        """(ids, supervised) of a piece (pieces.py), or None. Raises what `text` and `before` raise."""
        if self.borders is None or (found := self._ranges(piece)) is None:
            return None
        ids, supervised = [], []
        for first, last in found:
            ids += self.ids[first:last]
            supervised += self.supervised[first:last]
        return ids, supervised

    def _ranges(self, piece):
        """The two ranges of tokens of a piece: its head's, its exchanges'; None if there are none."""
        first = next((place for place, one in enumerate(self.messages) if one is piece[self.head]), None)
        if first is None:  # a copy, with the tools
            return None
        ends = self._place(first), self._place(first + len(piece) - self.head)
        if None in ends:
            return None
        begin, end = ends
        if first == self.head:
            return self._tokens((0, end))
        text = self.text(piece)
        shared = len(text) - (end - begin)
        if shared < 0 or text[:shared] != self.whole[:shared] or text[shared:] != self.whole[begin:end]:
            return None
        return self._tokens((0, shared), (begin, end))

    def _place(self, message):
        """Where the message of that number begins in the whole text; None if the template does not tell."""
        if message == self.head:
            return 0
        if message not in self._places:
            before = self.whole if message == len(self.messages) else self.before(self.messages[:message])
            self._places[message] = len(before) if self.whole.startswith(before) else None
        return self._places[message]

    def _tokens(self, *spans):
        """The ranges of tokens of spans of text; None if a span does not begin and end at borders."""
        found = [tuple(map(self.borders.get, span)) for span in spans]
        return None if any(None in one for one in found) else found
