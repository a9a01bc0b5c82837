"""One conversation that the target answers: it writes every assistant turn anew, after its own answers so far.

System and user turns are kept. Every assistant turn of the data is replaced by a new answer. An assistant turn that does not follow
a user turn (a greeting, a second turn in a row) is left out. User turns at the end get an answer even if the data has none. A
conversation ends early in three cases: after an answer cut off at the limit of tokens (no user goes on from half an answer), before
an empty answer, and at a prompt that cannot be answered. No torch.
"""

import hashlib
from collections import deque
from dataclasses import dataclass

# Reasons why a conversation ended early, or was not answered at all.
NO_REQUEST, CUT_OFF, EMPTY = "no user turn", "an answer cut at the limit of tokens", "an empty answer"
TOO_LONG, REFUSED = "too long for the model", "refused"


class Unanswerable(ValueError):
    """A prompt that cannot be answered, although the run is set up correctly; `reason` is TOO_LONG or REFUSED."""

    def __init__(self, reason, detail):
        super().__init__(detail)
        self.reason = reason


@dataclass
class Answer:
    """One answer of the target. finish_reason: "stop" or "length"; num_steps, num_accepted: counts of speculation."""

    text: str
    finish_reason: str
    num_tokens: int = 0
    num_steps: int = 0
    num_accepted: int = 0


class Dialogue:
    """A conversation in progress. index: its place in the data; seed: the run's; is_open: whether `prompt` needs an answer."""

    def __init__(self, index, conversation, seed):
        self.index, self._seed = index, seed
        self.messages, self.answers = [], []
        self.num_left_out = 0  # assistant turns of the data that have no new answer
        self.ended, self.detail = None, None  # the reason, if it ended early
        self._rest = deque(conversation)
        self._go_on()
        if not self.is_open:
            self.ended = NO_REQUEST

    @property
    def prompt(self):
        """The messages before the next answer: a list of {"role", "content"}."""
        return [{"role": message["role"], "content": message["content"]} for message in self.messages]

    @property
    def next_seed(self):
        """Seed of the next answer. It depends only on the run's seed and the answer's place, and so does the draw."""
        place = f"{self._seed}/{self.index}/{len(self.answers)}".encode()
        # 31 bits: some servers take no more.
        return int.from_bytes(hashlib.blake2b(place, digest_size=4).digest(), "little") >> 1

    def take(self, answer):
        """Add the answer and go on to the next turn that needs one."""
        # A limit may fall inside a character.
        text = answer.text.rstrip("\ufffd") if answer.finish_reason == "length" else answer.text
        self.answers.append(answer)
        if not text.strip():
            return self.end(EMPTY)
        self.messages.append({"role": "assistant", "content": text, "finish_reason": answer.finish_reason})
        self.is_open = False
        if answer.finish_reason == "stop":
            self._go_on()
        elif self._rest:
            self.end(CUT_OFF)

    def end(self, reason, detail=None):
        """No further answer: `reason` is one of the above, `detail` says more."""
        self.num_left_out += self.is_open + sum(message["role"] == "assistant" for message in self._rest)
        self.is_open, self.ended, self.detail = False, reason, detail

    def record(self):
        """The JSON-able record of a dialogue that has ended."""
        messages = list(self.messages)
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        return {
            "messages": messages,
            "tokens": sum(answer.num_tokens for answer in self.answers),
            "steps": sum(answer.num_steps for answer in self.answers),
            "accepted": sum(answer.num_accepted for answer in self.answers),
            "left_out": self.num_left_out,
            "ended": self.ended,
            "detail": self.detail,
        }

    def _go_on(self):
        self.is_open = False
        while self._rest:
            message = self._rest.popleft()
            if message["role"] != "assistant":
                self.messages.append(message)
                self.is_open |= message["role"] == "user"
            elif self.is_open:
                return
            else:
                self.num_left_out += 1
