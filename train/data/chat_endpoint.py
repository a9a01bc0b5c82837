"""Get answers from a server that speaks OpenAI's chat completions (vLLM, SGLang ...), for clusters that serve the target already.

`ChatEndpoint` asks for one answer and retries where that can help; `answer_by_endpoint` runs many dialogues in threads. The key
comes only from the environment variable OPENAI_API_KEY, and is never shown or sent to another address: redirects are errors.
Proxies are those of the environment. Not done here: streaming, tools, reasoning that a server returns separately.
"""

import http.client
import json
import os
import queue
import random
import re
import threading
import urllib.error
import urllib.parse
import urllib.request

from .dialogue import REFUSED, TOO_LONG, Answer, Unanswerable

TIMEOUT = 600  # seconds to wait for an answer, the server's queue included
ATTEMPTS = 10
# Seconds between attempts. Each wait is up to twice the one before, and at least half of that: nine take two to four minutes.
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
# Words of servers' errors for a prompt, or a prompt with max_tokens, that is longer than the model allows.
_TOO_LONG = re.compile(
    r"context[ _-]?(length|size|window)|longer than the (model|maximum)|max_model_len|prompt is too long", re.I
)


class EndpointUnavailable(OSError):
    """The server did not answer in any of several attempts."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments):
        return None


class ChatEndpoint:
    """A chat server. url: with or without /v1; model: its name there; sampling: further fields of every request (temperature ...).

    note(text) tells the user of attempts that failed. Raises ValueError for an invalid address, or a key that no header can hold.
    """

    def __init__(self, url, model, sampling, note):
        self.url = completions_url(url)
        self.model, self.sampling, self.note = model, sampling, note
        self._key = read_key()
        self._opener = urllib.request.build_opener(_NoRedirects)

    def answer(self, messages, seed, leaving):
        """The Answer to a conversation; leaving: a threading.Event that ends waiting between attempts.

        Raises Unanswerable if the server refuses this conversation, EndpointUnavailable if it does not answer, and ValueError, with
        the server's message, if no request could succeed.
        """
        body = {"model": self.model, "messages": messages, "seed": seed, **self.sampling}
        wait = FIRST_WAIT
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return _read_answer(self._post(body))
            except urllib.error.HTTPError as error:
                said = _message(error)
                if error.code not in (408, 429) and error.code < 500:
                    raise self._refusal(error.code, said) from None
                what, asked_to_wait = f"HTTP {error.code}: {said}", _seconds(error.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                what, asked_to_wait = f"{type(reason).__name__}: {reason}", 0
            if attempt == ATTEMPTS or leaving.is_set():
                break
            pause = max(wait * random.uniform(0.5, 1), min(asked_to_wait, LONGEST_WAIT))
            self.note(f"{self.url}: {what}; trying again in {pause:.1f} s ({attempt} of {ATTEMPTS})")
            leaving.wait(pause)
            wait = min(2 * wait, LONGEST_WAIT)
        raise EndpointUnavailable(
            f"{self.url} gave no answer in {attempt} attempts (the last: {what}); is the server up? Many requests at once on a "
            f"slow one take longer than the {TIMEOUT} s that are waited: lower --concurrency or --max-tokens"
        )

    def _post(self, body):
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers, method="POST")
        with self._opener.open(request, timeout=TIMEOUT) as response:
            return response.read()

    def _refusal(self, code, said):
        """The exception for an answer that another attempt would not change."""
        if code in (400, 413, 422):
            return Unanswerable(
                TOO_LONG if _TOO_LONG.search(said) else REFUSED, f"{self.url} says (HTTP {code}): {said}"
            )
        advice = ""
        if code in (401, 403):
            state = "is set" if self._key else "is not set"
            advice = f"; the key is read from the environment variable OPENAI_API_KEY, which {state}"
        if code == 404:
            advice = (
                f"; --model must be the name that the server knows (asked for {self.model!r}), --endpoint its address"
            )
        if 300 <= code < 400:
            advice = "; redirects are not followed: give the address that it leads to"
        return ValueError(f"{self.url} says (HTTP {code}): {said}{advice}")


def read_key():
    """The key in OPENAI_API_KEY without surrounding white space, "" for none. ValueError, never showing it, for an invalid key."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            "the environment variable OPENAI_API_KEY holds a line break, or something else than printable ASCII, within the key: "
            "set it anew"
        )
    return key


def completions_url(url):
    """http://host:8000, http://host:8000/v1 or the whole address -> .../v1/chat/completions. ValueError for an invalid address."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--endpoint must be an address like http://localhost:8000/v1, got {url!r}")
    if "@" in parts.netloc:
        raise ValueError("--endpoint takes no user and password in the address; a key is read from OPENAI_API_KEY")
    path = parts.path.rstrip("/")
    if not path.endswith("/chat/completions"):
        path = (path or "/v1") + "/chat/completions"
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def answer_by_endpoint(endpoint, dialogues, concurrency, stop):
    """Yield each dialogue when it has ended; `concurrency` run at a time, one thread each.  dialogues: an iterable of open ones

    stop.requested: stop asking. Errors of any thread are raised here, after the dialogues that had ended by then.
    """
    waiting, lock, leaving, ended = iter(dialogues), threading.Lock(), threading.Event(), queue.SimpleQueue()

    def work():
        try:
            while not leaving.is_set():
                with lock:
                    dialogue = next(waiting, None)
                if dialogue is None:
                    break
                while dialogue.is_open and not leaving.is_set():
                    try:
                        answer = endpoint.answer(dialogue.prompt, dialogue.next_seed, leaving)
                    except Unanswerable as error:
                        dialogue.end(error.reason, str(error))
                    else:
                        dialogue.take(answer)
                if not dialogue.is_open:
                    ended.put(dialogue)
            ended.put(None)
        except BaseException as error:  # for the main thread to raise
            ended.put(error)

    # Daemons: the process may exit without waiting for answers that are no longer needed.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    working = len(threads)
    try:
        while working and not stop.requested:
            try:
                one = ended.get(timeout=0.2)
            except queue.Empty:
                continue
            if isinstance(one, BaseException):
                raise one
            if one is None:
                working -= 1
            else:
                yield one
    finally:
        leaving.set()


def _read_answer(body):
    """The Answer in a completion."""
    try:
        reply = json.loads(body)
        choice = reply["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        usage = reply.get("usage") or {}
    except (ValueError, KeyError, IndexError, TypeError):
        raise ValueError(f"the endpoint's answer is not a chat completion: {body[:300]!r}") from None
    if reason not in ("stop", "length"):
        raise Unanswerable(REFUSED, f"the endpoint ended an answer with finish_reason {reason!r}")
    # No content: the whole answer was reasoning, which the server returns separately.
    return Answer(text or "", reason, usage.get("completion_tokens") or 0)


def _message(error):
    """The server's message about an error, at most 400 characters of it."""
    try:
        body = error.read()
    except (OSError, http.client.HTTPException):
        return error.reason
    text = body.decode("utf-8", "replace").strip()
    try:
        said = json.loads(text)
        for name in ("error", "detail", "message"):
            said = said.get(name, said) if isinstance(said, dict) else said
        text = said if isinstance(said, str) else json.dumps(said)
    except ValueError:
        pass
    return text[:400] or error.reason


def _seconds(header):
    """Seconds in a Retry-After header that holds a number; else 0."""
    try:
        return max(float(header), 0.0)
    except (TypeError, ValueError):
        return 0.0
