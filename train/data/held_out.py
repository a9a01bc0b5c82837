"""Split conversations into those that a run trains on and held-out ones that it is measured on."""

import hashlib
import json
from pathlib import Path

from .conversations import BUILT_IN, load_conversations, split_of


def choose_held_out(conversations, count, *, data, eval_data, target, note):
    """(conversations to train on, `count` held-out conversations).

    Held-out ones come from `eval_data` if given, without conversations of the training data. With a built-in set they come from the
    target's own heldout.jsonl, else from the set's held-out modules. Otherwise `conversations` are split by a hash of their text.
    note: as load_conversations takes it.
    """
    if not count:
        return conversations, []
    if eval_data:
        held_out = load_conversations(f"{eval_data}:heldout" if eval_data in BUILT_IN else eval_data, note=note)
        return conversations, _not_trained_on(conversations, held_out, count, data=data, eval_data=eval_data, note=note)
    if are_shipped(data, eval_data, target):
        return conversations, load_conversations(str(_shipped(target)))[:count]
    if _trains_on_built_in(data):
        return conversations, load_conversations(f"{split_of(data)[0]}:heldout")[:count]
    # By hash, not by place: a conversation that occurs twice must not land on both sides.
    hashes = [_hash(conversation) for conversation in conversations]
    by_hash = dict(zip(hashes, conversations))
    split = sorted(by_hash)[:count]
    rest = [conversation for one, conversation in zip(hashes, conversations) if one > split[-1]]
    if not rest:
        raise ValueError(
            f"{data} holds {len(conversations)} conversations and eval_prompts takes {count} out of training: "
            "nothing is left; give more data, fewer eval_prompts or eval_data"
        )
    return rest, [by_hash[one] for one in split]


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
    trained = {_hash(conversation) for conversation in conversations}
    apart = [conversation for conversation in held_out if _hash(conversation) not in trained]
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
    requests = {_requests(conversation) for conversation in conversations} - {()}
    asked = sum(_requests(conversation) in requests for conversation in measured)
    if asked:
        note(
            f"eval_data: {asked} of the {len(measured)} held-out conversations are in the data with other answers: "
            "acceptance may be measured too high"
        )
    return measured


def _hash(conversation):
    """Hash of roles and contents, without "finish_reason": the same words may have it or not."""
    words = [{key: value for key, value in message.items() if key != "finish_reason"} for message in conversation]
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()


def _requests(conversation):
    return tuple(message["content"] for message in conversation if message["role"] == "user")
