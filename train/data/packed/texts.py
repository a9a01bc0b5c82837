"""Plain texts as documents: everything is supervised, and a text longer than a row goes on in the next document.

A text comes as a conversation of one message of role "text".
"""

import numpy as np

from .documents import Collected
from .parts import EncodedBatch, Seen


class TextEncoder:
    """The encoding of texts by one tokenizer, into documents of at most row_length tokens.

    The tokenizer's own special tokens come first, as it puts them; its end token comes last.
    """

    def __init__(self, tokenizer, row_length):
        self.tokenizer, self.row_length = tokenizer, row_length

    def encode_batch(self, batch):
        """The EncodedBatch of some texts."""
        encoded, places, end = Collected(), [], self.tokenizer.eos_token_id
        texts = [text["content"] for (text,) in batch]
        for place, ids in enumerate(self.tokenizer(texts, verbose=False)["input_ids"]):
            if end is not None and ids[-1:] != [end]:
                ids = [*ids, end]
            for start in range(0, len(ids), self.row_length):
                piece = ids[start : start + self.row_length]
                encoded.append(piece, [True] * len(piece))
                places.append(place)
        return EncodedBatch(len(batch), encoded.documents(), np.array(places, dtype=np.int64), [], Seen())

    def notes(self, seen):
        """Nothing is left out."""
        return ()
