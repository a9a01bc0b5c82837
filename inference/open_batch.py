"""Add requests to an LLM one by one while others run, for callers whose next prompt depends on the last output.

    with OpenBatch(llm) as batch:
        batch.add("a prompt", SamplingParams(max_tokens=64), tag="first")
        while batch:
            for tag, output in batch.step():
                ...  # and perhaps batch.add(...)

An output does not depend on when its request came, or on other requests. Several threads may have a batch each on one LLM. Not done
here: waiting for prompts.
"""

from .line import Call


class OpenBatch:
    """Requests that its owner added and that have not ended; len() counts them. Leaving the block cancels them."""

    def __init__(self, llm):
        self.session = llm.session
        self._call = Call()
        self._open = {}  # Request: (Submission, tag)

    def __len__(self):
        return len(self._open)

    def add(self, prompt, sampling_params, tag=None):
        """Add one prompt, as for LLM.generate. Raises ValueError for what LLM.generate refuses, and for n above 1."""
        if sampling_params.n != 1:
            raise ValueError(f"an open batch makes one output per prompt, got n={sampling_params.n}")
        submission = self.session.submit(prompt, sampling_params, self._call)
        self._open[submission.requests[0]] = submission, tag

    def step(self):
        """One step of the engine.  -> list of (tag, RequestOutput) of the requests that have ended

        If other calls on the LLM finished some of them already, these are returned without a new step. While another thread steps
        the engine, this waits until some have ended, or for half a second.
        """
        if not self._call.ended:
            self.session.drive(self._call, lambda advanced: True)
        ended = [request for request in self._open if request in self._call.ended]
        self._call.ended.difference_update(ended)
        taken = [self._open.pop(request) for request in ended]
        return [(tag, self.session.output(submission)) for submission, tag in taken]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.session.leave(self._call)
        self._open.clear()
