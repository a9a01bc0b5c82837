"""The parts of a conversation that become documents: pieces that fit into a row, or one part per answer.

A conversation is cut only between exchanges: an exchange begins with what follows an answer (or a tool's result) and ends with the
last answer before the next one begins. Leading system messages, and the tools, go with every part.
"""

from collections.abc import Callable


def split_at_turns(messages: list[dict], fits: Callable[[list[dict]], bool], share: float) -> list[list[dict]]:
    """Pieces of a conversation, one after the other: as many exchanges in each as fit, and at least one. Those without an answer
    that counts are left out.

    fits: whether a part fits; share: of the conversation, about what fits, so that few parts have to be tried
    """
    starts, pieces, first = exchanges(messages), [], 0
    while first < len(starts):
        last = first + _most(
            len(starts) - first,
            lambda count, first=first: fits(_piece(messages, starts, first, first + count)),
            _expected(messages, starts, range(first, len(starts)), share),
        )
        pieces.append(_piece(messages, starts, first, last))
        first = last
    return [piece for piece in pieces if any(message["role"] == "assistant" and _counts(message) for message in piece)]


def latest_turns(messages: list[dict], fits: Callable[[list[dict]], bool], share: float) -> list[list[dict]]:
    """The end of a conversation, as the only piece: as many exchanges as fit, and at least one. Arguments of split_at_turns."""
    starts = exchanges(messages)
    end = len(starts)
    expected = _expected(messages, starts, range(end - 1, -1, -1), share)
    count = _most(end, lambda count: fits(_piece(messages, starts, end - count, end)), expected)
    return [_piece(messages, starts, end - count, end)]


def one_per_answer(messages: list[dict]) -> list[list[dict]]:
    """For each answer that says something and counts, the conversation up to it."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant" and _counts(message)]
    says = [place for place in answers if messages[place]["content"].strip() or messages[place].get("tool_calls")]
    return [messages[: place + 1] for place in says]


def _counts(message):
    return message.get("weight") != 0


def exchanges(messages: list[dict]) -> list[int]:
    """Where each exchange begins: numbers of messages."""
    first = next((place for place, message in enumerate(messages) if message["role"] != "system"), 0)
    answered = [message["role"] in ("assistant", "tool") for message in messages]
    later = [place for place in range(first + 1, len(messages)) if answered[place - 1] and not answered[place]]
    return [first, *later]


def _piece(messages, starts, first, last):
    """The exchanges from `first` to `last`, exclusive, with what goes with every part."""
    ends = [*starts, len(messages)]
    piece = [*messages[: starts[0]], *messages[ends[first] : ends[last]]]
    if "tools" in messages[0]:
        piece[0] = {**piece[0], "tools": messages[0]["tools"]}
    return piece


def _expected(messages, starts, exchanges, share):
    """How many of these exchanges, from the first on, may fit with the head, by their size."""
    sizes = [len(str(message)) for message in messages]
    ends = [*starts, len(messages)]
    room, count = share * sum(sizes) - sum(sizes[: starts[0]]), 0
    for exchange in exchanges:
        room -= sum(sizes[ends[exchange] : ends[exchange + 1]])
        if room < 0:
            break
        count += 1
    return count


def _most(limit, holds, guess):
    """The largest number up to `limit` for which `holds` is true, if it is true up to some number; 1 is taken for granted.

    guess: the number that is tried first
    """
    low, high, step = 1, limit + 1, 1
    count = min(max(guess, 2), limit)
    while low < count < high:
        if holds(count):
            low, count = count, count + step
        else:
            high, count = count, count - step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
