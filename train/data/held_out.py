"""Split conversations into those that a run trains on and held-out ones that it is measured on."""

import hashlib
import json
from itertools import chain, compress, zip_longest
from pathlib import Path

import numpy as np

from .conversations import Chosen, load_conversations
from .sources.records import BUILT_IN, split_of


def choose_held_out(conversations, count, *, data, eval_data, target, note, with_fields=True):
    """(conversations to train on, `count` held-out conversations).  conversations: a list, or a Source

    Held-out ones come from `eval_data` if given, without conversations of the training data. With a built-in set they come from the
    target's own heldout.jsonl, else from the set's held-out modules. Otherwise `conversations` are split by a hash of their text.
    note, with_fields: as load_conversations takes them.
    """
    if not count:
        return conversations, []
    if eval_data:
        source = f"{eval_data}:heldout" if eval_data in BUILT_IN else eval_data
        held_out = load_conversations(source, note=note, with_fields=with_fields)
        return conversations, _not_trained_on(conversations, held_out, count, data=data, eval_data=eval_data, note=note)
    if are_shipped(data, eval_data, target):
        return conversations, load_conversations(str(_shipped(target)))[:count]
    if _trains_on_built_in(data):
        return conversations, load_conversations(f"{split_of(data)[0]}:heldout")[:count]
    # By hash, not by place: a conversation that occurs twice must not land on both sides.
    hashes = _hashes(hash_of_conversation(conversation) for conversation in conversations)
    split, places = np.unique(hashes[::-1], return_index=True)  # the last one of several with the same words
    split, places = split[:count], (len(hashes) - 1 - places[:count]).tolist()
    kept = hashes > split[-1]
    if not kept.any():
        raise ValueError(
            f"{data} holds {len(hashes)} conversations and eval_prompts takes {count} out of training: "
            "nothing is left; give more data, fewer eval_prompts or eval_data"
        )
    wanted = set(places)
    held_out = {place: messages for place, messages in enumerate(conversations) if place in wanted}
    rest = list(compress(conversations, kept)) if isinstance(conversations, list) else Chosen(conversations, kept)
    return rest, [held_out[place] for place in places]


def are_shipped(data, eval_data, target):
    """Whether a run measures on the heldout.jsonl in its target's folder, where every reader of the run finds it."""
    return not eval_data and _trains_on_built_in(data) and _shipped(target).is_file()


def _shipped(target):
    return Path(target, "heldout.jsonl")


def _trains_on_built_in(data):
    name, split = split_of(data)
    return name in BUILT_IN and split == "train"


def _not_trained_on(conversations, held_out, count, *, data, eval_data, note):
    """The first `count` of `held_out` that are not in `conversations`."""
    pairs = ((hash_of_conversation(conversation), _hash_of_requests(conversation)) for conversation in conversations)
    trained, requests = _hashes(chain.from_iterable(pairs)).reshape(-1, 2).T
    apart = list(compress(held_out, ~np.isin(_hashes(map(hash_of_conversation, held_out)), trained)))
    if not apart:
        raise ValueError(
            f"all {len(held_out)} conversations of eval_data {eval_data} are also in the training data, {data}: "
            "choose another eval_data, or leave it out"
        )
    if len(apart) < len(held_out):
        note(
            f"eval_data: {len(held_out) - len(apart)} of {len(held_out)} conversations are also in the training data and are "
            "left out"
        )
    measured = apart[:count]
    asking = [conversation for conversation in measured if _requests(conversation)]
    asked = int(np.isin(_hashes(map(_hash_of_requests, asking)), requests).sum())
    if asked:
        note(
            f"eval_data: {asked} of the {len(measured)} held-out conversations are in the data with other answers: "
            "acceptance may be measured too high"
        )
    return measured


def in_all(lists):
    """The conversations that all of the lists hold, in the order of the first."""
    hashes = [set(map(hash_of_conversation, some)) for some in lists]
    return [one for one in lists[0] if all(hash_of_conversation(one) in some for some in hashes)]


def in_turn(lists):
    """The conversations of several lists, the first of each, then the second; equal ones once."""
    found = {}
    for one in chain.from_iterable(zip_longest(*lists)):
        if one is not None:
            found.setdefault(hash_of_conversation(one), one)
    return list(found.values())


def hash_of_conversation(conversation):
    """Hash of roles and contents, without "finish_reason": the same words may have it or not.  -> uint64"""
    words = [{key: value for key, value in message.items() if key != "finish_reason"} for message in conversation]
    return _hash_of(words)


def _hash_of_requests(conversation):
    return _hash_of(_requests(conversation))


def _hash_of(words):
    return np.uint64(int.from_bytes(hashlib.sha256(json.dumps(words, sort_keys=True).encode()).digest()[:8]))


def _hashes(found):
    return np.fromiter(found, dtype=np.uint64)


def _requests(conversation):
    return tuple(message["content"] for message in conversation if message["role"] == "user")
