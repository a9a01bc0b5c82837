"""Find out in seconds whether the Hub answers at all, before its libraries try for minutes. No torch.

    folder = snapshot_download(repo_id, **hub_options(repo_id))
    raise ValueError(f"no head at {name!r}: {ask_hub().words} gave no config.json")

huggingface_hub repeats a request for a file's name six times, with pauses of 23 s in all, and waits up to a minute for each
answer; its requests for a repository wait forever. If the Hub does not answer here, the libraries are told to search only their
cache. If it answers, the libraries' own retries stay as they are.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HTTPError

PATIENCE = 5  # seconds to wait for an answer; HF_HUB_ETAG_TIMEOUT, where it is set, counts instead
PAUSES = (1, 1)  # seconds before a request that failed at once is repeated
KEPT = 10  # seconds for which an answer is reused: one command asks about several files

_found = {}  # endpoint -> (when, why it does not answer, "" where it does)


@dataclass(frozen=True)
class HubAnswer:
    """Whether the Hub answers. why: the reason if it does not, else ""; words: the Hub and whether it was asked, for an error"""

    why: str
    words: str

    @property
    def local_files_only(self):
        """The libraries' option of this name."""
        return bool(self.why)


def ask_hub():
    """The HubAnswer of constants.ENDPOINT. In offline mode nothing is asked: the libraries know of that mode themselves."""
    name = f"the Hub at {constants.ENDPOINT}"
    if constants.HF_HUB_OFFLINE:
        return HubAnswer("", f"{name} (HF_HUB_OFFLINE is set, only its cache was searched)")
    when, why = _found.get(constants.ENDPOINT, (None, ""))
    if when is None or time.monotonic() - when > KEPT:
        why = _why_silent(constants.ENDPOINT)
        _found[constants.ENDPOINT] = time.monotonic(), why
    if why:
        return HubAnswer(why, f"{name} (it does not answer: {why}; only its cache was searched)")
    return HubAnswer("", f"{name} (asked)")


def hub_options(name):
    """Keywords for the libraries' functions that take a folder or a Hub id, so that they do not ask a Hub that does not answer."""
    return {"local_files_only": True} if not Path(name).is_dir() and ask_hub().local_files_only else {}


def _why_silent(endpoint):
    """Why there is no answer of any kind, in one line; "" for any answer, even a refusal."""
    waited = constants.HF_HUB_ETAG_TIMEOUT
    patience = PATIENCE if waited == constants.DEFAULT_ETAG_TIMEOUT else waited
    for pause in (*PAUSES, None):
        try:
            get_session().head(endpoint, timeout=patience)
            return ""
        except HTTPError as error:  # of the transport: broken, refused, timed out, no such name
            reason = " ".join(str(error).split()) or type(error).__name__
            if "Timeout" in type(error).__name__:
                return f"{reason} after {patience:g} s, which HF_HUB_ETAG_TIMEOUT changes"
            if pause is None:
                return reason
        time.sleep(pause)
