"""The reasoning of an answer, told apart from the rest of its text by the markers that the model writes.

    reasoning = Reasoning(("<think>", "</think>"), prompt_text)
    reasoning.split("<think>\\nTwo and two", ended=False)   # -> ("\\nTwo and two", "")
    reasoning.split(" is four.</think>\\n4", ended=True)    # -> (" is four.", "\\n4")

Reasoning comes first, if at all. A template may write the opening marker itself: then the answer begins inside. No torch.
"""

from ..engine.stopping import stable_length


class Reasoning:
    """markers: (opening, closing); prompt: the text that the answer goes on from"""

    def __init__(self, markers, prompt):
        self._open, self._close = markers
        self._inside = prompt.rstrip().endswith(self._open)
        self._state, self._held = "start", ""

    def split(self, text, ended):
        """New text of the answer, and whether it is the last.  -> (new reasoning, new text after it)

        What may be the beginning of a marker is held until it is known.
        """
        self._held += text
        if self._state == "start":
            begun = self._held.lstrip()
            if begun.startswith(self._open):
                self._state, self._held = "inside", begun.removeprefix(self._open)
            elif self._open.startswith(begun) and not ended:
                return "", ""
            else:
                self._state = "inside" if self._inside else "after"
        reasoning = ""
        if self._state == "inside":
            reasoning, closed, rest = self._held.partition(self._close)
            if not closed:
                end = len(reasoning) if ended else stable_length(reasoning, [self._close])
                reasoning, self._held = reasoning[:end], reasoning[end:]
                return reasoning, ""
            self._state, self._held = "after", rest
        content, self._held = self._held, ""
        return reasoning, content
