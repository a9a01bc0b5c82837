"""Add requests to an LLM one by one while others run, for callers whose next prompt depends on the last output.

    with OpenBatch(llm) as batch:
        batch.add("a prompt", SamplingParams(max_tokens=64), tag="first")
        while batch:
            for tag, output in batch.step():
                ...  # and perhaps batch.add(...)

An output does not depend on when its request came, or on other requests. Not done here: waiting for prompts, threads.
"""


class OpenBatch:
    """Requests that its owner added and that have not ended; len() counts them. Leaving the block cancels them."""

    def __init__(self, llm):
        self.session = llm.session
        self._open = {}  # Submission: tag

    def __len__(self):
        return len(self._open)

    def add(self, prompt, sampling_params, tag=None):
        """Add one prompt, as for LLM.generate. Raises ValueError for what LLM.generate refuses, and for n above 1."""
        if sampling_params.n != 1:
            raise ValueError(f"an open batch makes one output per prompt, got n={sampling_params.n}")
        self._open[self.session.submit(prompt, sampling_params)] = tag

    def step(self):
        """One step of the engine.  -> list of (tag, RequestOutput) of the requests that have ended

        If other calls on the LLM finished some of them already, these are returned without a new step.
        """
        if not any(submission.finished for submission in self._open):
            self.session.step()
        ended = [submission for submission in self._open if submission.finished]
        return [(self._open.pop(submission), self.session.output(submission)) for submission in ended]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for submission in self._open:
            self.session.cancel(submission)
        self._open.clear()
