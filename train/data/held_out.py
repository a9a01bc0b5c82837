"""Split conversations into those that a run trains on and held-out ones that it is measured on."""

import hashlib
import json
import re
from collections import defaultdict
from itertools import chain, compress, zip_longest
from pathlib import Path

import numpy as np

from .conversations import Chosen, load_conversations
from .sources.records import BUILT_IN, split_of

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)=(.+)")


def eval_sets(eval_data):
    """[(name, source)] of NAME=SOURCE,NAME=SOURCE; a source without a name has the name "".  ValueError for anything in between"""
    if not _NAMED.match(eval_data) or Path(eval_data).expanduser().exists():
        return [("", eval_data)] if eval_data else []
    parts = [(part, _NAMED.fullmatch(part.strip())) for part in eval_data.split(",")]
    if unnamed := next((part for part, named in parts if not named), None):
        raise ValueError(f"eval_data {eval_data!r}: {unnamed!r} has no name: write NAME=SOURCE,NAME=SOURCE")
    names = [named[1] for _, named in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"eval_data {eval_data!r} gives one name to two sets: name each differently")
    return [(named[1], named[2]) for _, named in parts]


def choose_held_out(conversations, count, *, data, eval_data, target, note, with_fields=True):
    """(conversations to train on, `count` held-out conversations).  conversations: a list, or a Source

    Held-out ones come from `eval_data` if given, `count` (None: all) of each of its sets, without conversations of the training
    data; those of a named set have its name as "set" of their first message. With a built-in set they come from the
    target's own heldout.jsonl, else from the set's held-out modules. Otherwise `conversations` are split by a hash of their text.
    note, with_fields: as load_conversations takes them.
    """
    if count == 0:
        return conversations, []
    if eval_data:
        options, sets = {"note": note, "with_fields": with_fields}, {}
        for name, source in eval_sets(eval_data):
            loaded = load_conversations(f"{source}:heldout" if source in BUILT_IN else source, **options)
            sets[name] = [[one[0] | {"set": name}, *one[1:]] if name else one for one in loaded]
        return conversations, _not_trained_on(conversations, sets, count, data=data, eval_data=eval_data, note=note)
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


def _not_trained_on(conversations, sets, count, *, data, eval_data, note):
    """The first `count` (None: all) of each set that are not in `conversations`, one set after the other."""
    pairs = ((hash_of_conversation(conversation), _hash_of_requests(conversation)) for conversation in conversations)
    trained, requests = _hashes(chain.from_iterable(pairs)).reshape(-1, 2).T
    measured = []
    for name, held_out in sets.items():
        called = f"eval_data {name}".strip()
        apart = list(compress(held_out, ~np.isin(_hashes(map(hash_of_conversation, held_out)), trained)))
        if not apart:
            raise ValueError(
                f"all {len(held_out)} conversations of eval_data {name or eval_data} are also in the training data, {data}: "
                "choose another eval_data, or leave it out"
            )
        if len(apart) < len(held_out):
            note(
                f"{called}: {len(held_out) - len(apart)} of {len(held_out)} conversations are also in the training data and are "
                "left out"
            )
        chosen = apart[:count]
        asking = [conversation for conversation in chosen if _requests(conversation)]
        asked = int(np.isin(_hashes(map(_hash_of_requests, asking)), requests).sum())
        if asked:
            note(
                f"{called}: {asked} of the {len(chosen)} held-out conversations are in the data with other answers: "
                "acceptance may be measured too high"
            )
        measured += chosen
    return measured


def in_all(lists):
    """The conversations that all of the lists hold, in the order of the first."""
    hashes = [set(map(hash_of_conversation, some)) for some in lists]
    return [one for one in lists[0] if all(hash_of_conversation(one) in some for some in hashes)]


def first_of_each_set(conversations, count):
    """The first `count` of each named set, in their order; of those without a name, too."""
    found = defaultdict(list)
    for one in conversations:
        found[one[0].get("set")].append(one)
    return [one for some in found.values() for one in some[:count]]


def in_turn(lists):
    """The conversations of several lists, the first of each, then the second; equal ones once."""
    found = {}
    for one in chain.from_iterable(zip_longest(*lists)):
        if one is not None:
            found.setdefault(hash_of_conversation(one), one)
    return list(found.values())


def hash_of_conversation(conversation):
    """Hash of roles and contents, without "finish_reason" and "set": the same words may have them or not.  -> uint64"""
    words = [
        {key: value for key, value in message.items() if key not in ("finish_reason", "set")}
        for message in conversation
    ]
    return _hash_of(words)


def _hash_of_requests(conversation):
    return _hash_of(_requests(conversation))


def _hash_of(words):
    return np.uint64(int.from_bytes(hashlib.sha256(json.dumps(words, sort_keys=True).encode()).digest()[:8]))


def _hashes(found):
    return np.fromiter(found, dtype=np.uint64)


def _requests(conversation):
    return tuple(message["content"] for message in conversation if message["role"] == "user")
