"""Ask the Hub again where it did not answer: connections that break, 5xx and 429, with growing pauses and an end.

huggingface_hub repeats some of its requests by itself, for half a minute at most. This is for what it leaves alone (creating,
asking, committing), and for networks that are gone for longer. It does not repeat what the Hub refuses.
"""

import sys
import time

from huggingface_hub.errors import HfHubHTTPError, HTTPError

# Seconds before the second, third ... attempt of one thing: eight minutes in all, then it is given up.
PAUSES = (1, 4, 15, 40, 60, 120, 240)
LONGEST_WAIT = 600  # seconds: of what a Hub asks for with Retry-After


def patiently(action, doing, attempts=None):
    """action() once it is answered.  doing: what it is called in a note; attempts: None for one more than PAUSES

    Raises what the last attempt raised, and at once what another attempt would not change.
    """
    pauses = PAUSES if attempts is None else PAUSES[: attempts - 1]
    for number, pause in enumerate(pauses, start=2):
        try:
            return action()
        except Exception as error:  # the client's transports raise their own kinds
            if not may_pass(error):
                raise
            pause = max(pause, _wanted_wait(error))
            print(
                f"{doing}: {reason(error)}; attempt {number} of {len(pauses) + 1} in {pause:g} s",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(pause)
    return action()


def may_pass(error):
    """Whether the same request may be answered later: the connection broke, or the Hub was busy (408, 429, 5xx)."""
    for one in chain(error):
        if isinstance(one, HfHubHTTPError):
            return status(one) in (408, 429) or status(one) >= 500
        if isinstance(one, HTTPError | TimeoutError):  # of HTTP's transport
            return True
        if isinstance(one, ConnectionError):
            # hf_xet has one kind for all that the storage answers; the status is in its text alone.
            return "status client error (" not in str(one) or "(429" in str(one) or "(408" in str(one)
    return False


def status(error):
    """The HTTP status that the Hub refused with; 0 where no answer is known."""
    return next((one.response.status_code for one in chain(error) if isinstance(one, HfHubHTTPError)), 0)


def chain(error):
    """The error and what it came from: uploads wrap what went wrong in one that only names the file."""
    while error is not None:
        yield error
        error = error.__cause__


def reason(error):
    """What went wrong, in one line: what the Hub answered, else of wrapped errors the innermost that says something."""
    errors = list(chain(error))
    answers = [one for one in errors if isinstance(one, HfHubHTTPError)]
    said = [" ".join(str(one).split()) for one in answers[:1] or reversed(errors)]
    return next((text for text in said if text), type(error).__name__)


def _wanted_wait(error):
    """Seconds that the answer asks to wait (Retry-After), 0 where it does not say."""
    for one in chain(error):
        if isinstance(one, HfHubHTTPError):
            wanted = one.response.headers.get("Retry-After", "")
            return min(int(wanted), LONGEST_WAIT) if wanted.isdigit() else 0
    return 0
