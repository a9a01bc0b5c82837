"""The rows of a run: choose their conversations, pack them, count their labels, and deal them to ranks in order.

Letters: R rows, T tokens per row.
"""

import contextlib
import functools
import math
import random
import sys
import zlib
from datetime import date
from pathlib import Path

import numpy as np
from accelerate.utils import broadcast_object_list

from ...heads.storage.atomic_write import write_whole
from .conversations import Chosen, Source, load_conversations
from .encoding import BATCH, choose_encodable, encode_places
from .held_out import choose_held_out, eval_sets, first_of_each_set, in_all, in_turn
from .packed.blend import BlendedDocuments, BlendedRows, rows_per_epoch
from .packed.layout import laid_out
from .packed.packing import DocumentRows
from .packed.store import DocumentStore, default_folder, tokenizer_facts
from .packed.workers import num_workers
from .sources.data_sets import data_sets
from .sources.records import BUILT_IN, source_facts, split_of
from .template_date import prints_date

KEPT_BYTES = 2**24  # smaller data are packed sooner than they are looked up


def load_documents(recipe, tokenizer, processes):
    """(Documents to train on, held-out conversations, lists of messages) of a run.  processes: of start_processes

    Of several data sets BlendedDocuments. Large data are packed by one process, and kept for the others and for further runs
    (packed/store.py), each set by itself.
    """
    sets = data_sets(recipe.data)
    if len(sets) > 1:
        documents, measured = _load_sets(recipe, sets, tokenizer, processes)
    else:
        given = tokenizer, processes.accelerator, processes.note
        documents, measured = _load_set(recipe, recipe.data, recipe.eval_prompts, *given)
    if lost := _lost_set(recipe, measured):
        raise ValueError(
            f"the chat template takes none of the conversations of eval_data {lost} that would be measured on: mend them, or leave "
            "the set out"
        )
    return documents, measured


def _load_sets(recipe, sets, tokenizer, processes):
    """load_documents for several data sets."""
    # Of eval_data each set keeps all that it does not train on: cut first, what is left in all sets could be too few.
    num_held_out = None if recipe.eval_prompts and recipe.eval_data else recipe.eval_prompts
    loaded = []
    for one in sets:
        told = functools.partial(_note_of, one.name, processes.note)
        loaded.append(_load_set(recipe, one.name, num_held_out, tokenizer, processes.accelerator, told))
    documents, held_out = zip(*loaded)
    blended = BlendedDocuments(documents, [one.name for one in sets], [one.weight for one in sets])
    if recipe.eval_data:
        measured = first_of_each_set(in_all(held_out), recipe.eval_prompts)
        if lost := _lost_set(recipe, measured):
            raise ValueError(
                f"each conversation of eval_data {lost} is trained on in one of the sets of {recipe.data}: name another source "
                "for it, or leave it out"
            )
        measured = choose_encodable(tokenizer, measured, processes.note)
    else:
        kept = [_in_no_other(recipe, tokenizer, documents, number, some) for number, some in enumerate(held_out)]
        if lost := sum(map(len, held_out)) - sum(map(len, kept)):
            processes.note(f"{lost} conversations held out of one data set are in another, and are not measured on")
        measured = in_turn(kept)[: recipe.eval_prompts]
    if recipe.eval_prompts and not measured:
        raise ValueError(
            f"all conversations to measure on are trained on in one of the sets of {recipe.data}: name other eval_data, or set "
            "eval_prompts to 0"
        )
    return blended, measured


def _lost_set(recipe, measured):
    """The name of a set of eval_data that has no conversation in `measured`; None if each has one, or nothing is to be measured."""
    names = [name for name, _ in eval_sets(recipe.eval_data) if name] if recipe.eval_prompts else []
    left = {one[0].get("set") for one in measured}
    return next((name for name in names if name not in left), None)


def _note_of(name, note, text):
    note(text if text.startswith(name) else f"{name}: {text}")


def _in_no_other(recipe, tokenizer, documents, number, held_out):
    """Those of the conversations held out of data set `number` that no other set trains on."""
    if not held_out:
        return []
    how = {"rules": recipe.data_rules, "row_length": recipe.row_length, "document": recipe.document}
    encoded, places = encode_places(tokenizer, held_out, **how)
    others = [one for other, one in enumerate(documents) if other != number]
    apart = {place for place, (ids, _) in zip(places.tolist(), encoded) if not any(one.holds(ids) for one in others)}
    return [held_out[place] for place in sorted(apart)]


def _load_set(recipe, data, num_held_out, tokenizer, accelerator, note):
    """load_documents for one data set.  num_held_out: of choose_held_out"""
    facts = _facts(recipe, data, num_held_out, tokenizer)
    if facts is None:
        return _make_documents(recipe, data, num_held_out, tokenizer, note)

    def make(note, parts):
        made = _make_documents(recipe, data, num_held_out, tokenizer, note, workers=num_workers(), parts=parts)
        if _sources(recipe, data) != facts["sources"]:
            raise ValueError(f"the data {data} have changed while they were read: start again")
        return made

    place = Path(data).expanduser()
    name = place.name if place.is_absolute() or place.exists() else data
    store = DocumentStore(recipe.packed_data or default_folder(), name, facts)
    return store.load(make, accelerator, note)


def _facts(recipe, data, num_held_out, tokenizer):
    """What the documents of a set follow from, the same on all ranks.

    None for built-in data, small data without a named folder, and if the recipe says so: they are encoded in memory.
    """
    if recipe.packed_data == "memory":
        return None
    sources, error = None, None
    try:
        sources = _sources(recipe, data)
    except ValueError as found:
        error = str(found)
    sources, error = broadcast_object_list([sources, error])  # as rank 0 sees them
    if error:
        raise ValueError(error)
    if sources[0] is None:
        return None
    known = [source for source in sources if source]
    sizes = [size for source in known for _, size, _ in source["files"]]
    if not recipe.packed_data and sum(sizes) < KEPT_BYTES and not any(source["sets"] for source in known):
        return None
    keys = ("seed", "max_tokens", "max_examples", "row_length", "data_rules", "document")
    facts = {name: getattr(recipe, name) for name in keys} | {"eval_prompts": num_held_out}
    if not recipe.max_tokens and recipe.data_rules < 2 and recipe.document != "text":
        del facts["row_length"]  # it counts where the tokens of rows are counted, or long conversations are split
    if names := [name for name, _ in eval_sets(recipe.eval_data) if name]:
        facts["eval_sets"] = names
    if None in sources:  # eval_data is made from the Python source
        facts["python"] = sys.version
    if prints_date(tokenizer):  # a run from before dates were kept
        facts["date"] = date.today().isoformat()
    return facts | {"sources": sources, "tokenizer": tokenizer_facts(tokenizer), "batch": BATCH}


def _sources(recipe, data):
    return [source_facts(one) for one in (data, *(source for _, source in eval_sets(recipe.eval_data)))]


def _make_documents(recipe, data, num_held_out, tokenizer, note, **how):
    with_fields, texts = recipe.data_rules > 0, recipe.document == "text"
    if split_of(data)[0] in BUILT_IN and not texts:
        conversations = load_conversations(data)
    else:
        conversations = Source(data, note, with_fields, texts)
    kept, held_out = choose_held_out(
        [] if texts else conversations,  # no conversation to measure on is among texts
        num_held_out,
        data=data,
        eval_data=recipe.eval_data,
        target=recipe.target,
        note=note,
        with_fields=with_fields,
    )
    documents = choose_documents(
        tokenizer,
        conversations if texts else kept,
        recipe.row_length,
        recipe.max_tokens,
        recipe.seed,
        note=note,
        rules=recipe.data_rules,
        document=recipe.document,
        max_examples=recipe.max_examples,
        **how,
    )
    if num_held_out is not None:
        held_out = choose_encodable(tokenizer, held_out, note)
    return documents, held_out


def choose_documents(tokenizer, conversations, row_length, max_tokens, seed, max_examples=0, **encoding):
    """Encode conversations (a list, or a Source) in an order drawn from `seed`, up to so many and so many tokens (0: all).

    encoding: note, rules, document, workers, parts of encode_places  ->  Documents, those of a conversation one after the other
    """
    order = None
    if max_tokens or max_examples:
        sizes = np.array([sum(len(message["content"]) for message in messages) for messages in conversations])
        order = _shuffled(len(sizes), seed)[: max_examples or None]
        if max_tokens:
            # Stop at far more characters than needed tokens: this spares encoding conversations that the cap drops.
            order = order[: int((np.cumsum(sizes[order]) <= max_tokens * 16).sum()) + 1]
        chosen = np.zeros(len(sizes), dtype=bool)
        chosen[order] = True
        conversations = Chosen(conversations, chosen)
    encoding |= {"total": _count(conversations), "row_length": row_length}
    encoded, places = encode_places(tokenizer, conversations, True, **encoding)
    if order is None:
        order = _shuffled(_count(conversations), seed)
    else:
        places = np.flatnonzero(chosen)[places]
    turn = np.empty(order.max(initial=-1) + 1, dtype=np.int64)  # of each conversation
    turn[order] = np.arange(len(order))
    encoded = encoded.take(np.argsort(turn[places], kind="stable"))
    if max_tokens:
        total = np.cumsum(np.minimum(encoded.lengths, row_length))
        encoded = encoded[: max(int((total <= max_tokens).sum()), 1)]
    return encoded


def _count(conversations):
    """How many there are; None for a Source that nobody has gone through."""
    return len(conversations) if isinstance(conversations, list) else conversations.count


def _shuffled(count, seed):
    """The order drawn from `seed`.  -> int64 [count]"""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return np.array(order, dtype=np.int64)


def build_rows(documents, row_length, pad_token_id, note, kind="documents"):
    """Pack documents (Documents, or pairs (ids, supervised)). `note(text)` is told the counts; `kind` is their name in it.

    Rows without a label (such as one long request whose answer was cut off) are left out. Returns (DocumentRows, labels per row
    int64 [R]); of BlendedDocuments (BlendedRows, labels). Raises ValueError if no label, or no row of a set, is left.
    """
    if isinstance(documents, BlendedDocuments):
        return _blend_rows(documents, row_length, pad_token_id, note, kind)
    packed, counts = laid_out(documents, row_length, pad_token_id or 0)
    kept = counts > 0
    if not kept.any():
        raise ValueError(
            f"no assistant token of {len(documents)} {kind} lies within row_length {row_length} with a token two places "
            "before it: raise row_length"
        )
    packed = packed.keep(kept)
    note(
        f"{len(documents)} {kind} in {len(packed)} rows of {row_length} tokens, {int(counts.sum())} labels; "
        f"{packed.num_cut} longer than a row were cut, {int((~kept).sum())} rows without a label left out"
    )
    return packed, counts[kept]


def _blend_rows(blended, row_length, pad_token_id, note, kind):
    built = []
    for name, documents in zip(blended.names, blended.sets):
        built.append(build_rows(documents, row_length, pad_token_id, functools.partial(_note_of, name, note), kind))
    parts, labels = zip(*built)
    counts, total = rows_per_epoch(list(map(len, parts)), blended.weights), sum(map(len, parts))
    for name, part, count in zip(blended.names, parts, counts.tolist()):
        if not count:
            raise ValueError(f"the weight of {name} gives it none of the {total:,} rows of an epoch: raise it")
        note(
            f"{name}: {count:,} of the {total:,} rows of an epoch ({count / total:.1%}), {count / len(part):.2f} times its own"
        )
    return BlendedRows(parts, counts), np.concatenate(labels)


def answer_ends(packed):
    """Mark the last token of every supervised stretch in a document.  -> bool [R, T]

    A document that fills a whole row may have been cut, so its end is not marked.
    """
    goes_on = packed.supervised[:, 1:] & (packed.document_ids[:, 1:] == packed.document_ids[:, :-1])
    ends = packed.supervised.clone()
    ends[:, :-1] &= ~goes_on
    ends[:, -1] &= packed.position_ids[:, -1] < packed.position_ids.shape[1] - 1
    return ends


def rows_of_step(step, rows_per_step, packed, seed):
    """Rows of optimiser step `step` (from 0): those of the epochs, permuted, one after the other.  -> int64 [rows_per_step]"""
    places, num_rows = np.arange(step * rows_per_step, (step + 1) * rows_per_step), len(packed)
    epochs = places // num_rows
    rows = np.empty(rows_per_step, dtype=np.int64)
    for epoch in set(epochs.tolist()):
        here = epochs == epoch
        rows[here] = packed.rows_of_epoch(epoch)[_order_of_epoch(seed, epoch, num_rows)[places[here] % num_rows]]
    return rows


@functools.lru_cache(maxsize=2)
def _order_of_epoch(seed, epoch, num_rows):
    """The permutation of an epoch's rows, drawn once: a million rows take 20 ms.  -> int64 [num_rows]"""
    return np.random.default_rng((seed, epoch)).permutation(num_rows)


def deal_rows(rows, recipe, accelerator):
    """Yields this rank's share of an optimiser step's `rows`, per micro-batch: (place of the first row, rows int64 [B])."""
    world, rank, size = accelerator.num_processes, accelerator.process_index, recipe.batch_rows
    for micro in range(recipe.accumulate):
        first = (micro * world + rank) * size
        yield first, rows[first : first + size]


def select_rows(packed, index, device):
    """(input_ids, position_ids, document_ids, supervised) of rows `index` [B] on `device`, [B, T] each."""
    some = packed.select(index)
    return tuple(part.to(device) for part in (some.input_ids, some.position_ids, some.document_ids, some.supervised))


def rows_to_check(packed, device):
    """(input_ids, position_ids, document_ids) of the rows with the most documents and with the longest one, [1 or 2, T] each."""
    return select_rows(packed, sorted(set(packed.busiest())), device)[:3]


def fingerprint(packed):
    """A checksum of the rows: two runs with the same checksum train on the same rows. Kept beside documents of a store."""
    if isinstance(packed, BlendedRows):
        return zlib.crc32(np.array([*map(fingerprint, packed.parts), *packed.counts], dtype=np.int64))
    kept = _kept_fingerprint(packed)
    if kept and kept.is_file():
        return int(kept.read_text())
    checksum = 0
    for name in ("input_ids", "document_ids", "supervised"):
        for some in packed.blocks():
            checksum = zlib.crc32(getattr(some, name).numpy(), checksum)
    if kept:
        with contextlib.suppress(OSError):  # a folder that others may only read
            write_whole(kept, str(checksum))
    return checksum


def _kept_fingerprint(packed):
    """The file of these rows' fingerprint; None if their documents lie in no store."""
    folder = packed.documents.folder if isinstance(packed, DocumentRows) else None
    if folder is None:
        return None
    layout = zlib.crc32(packed.starts, zlib.crc32(packed.order))
    return folder / f"rows-{packed.row_length}-{packed.pad_token_id}-{layout:08x}.txt"


def describe_micro_steps(packed, fed, shares, *, at_fault, tokenizer):
    """This process's part of an optimiser step that was not finite, for a file of JSON lines: a dict per micro-step.

    fed: the rows of each micro-step; shares: its results of `accumulate_gradients`; at_fault: the micro-steps whose text is told.
    """
    told = []
    for i, (rows, share) in enumerate(zip(fed, shares, strict=True)):
        losses = (share[:, 0] / share[:, 1].clamp_min(1)).tolist()
        losses = [loss if math.isfinite(loss) else str(loss) for loss in losses]  # JSON has no NaN
        some, texts = packed.select(rows), []
        if i in at_fault:
            for ids, documents in zip(some.input_ids, some.document_ids):
                texts.append(tokenizer.decode(ids[documents >= 0].tolist()))
        told.append({"rows": rows, "losses": losses, "texts": texts})
    return told
