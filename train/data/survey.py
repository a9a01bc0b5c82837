"""What a data set holds, before one trains on it: `headstart data`."""

import json
from collections import Counter

import numpy as np
from tqdm import tqdm

from ...inference.models.target_source import load_tokenizer
from .conversations import Source, is_cut
from .encoding import encode_places
from .held_out import hash_of_conversation
from .packed.blend import rows_per_epoch
from .packed.packing import lay_out
from .packed.workers import num_workers
from .sources.data_sets import data_sets

QUANTILES = {"least": 0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "most": 1}


def survey(data, tokenizer=None, row_length=2048, document="conversation", trust_remote_code=False):
    """A dict that describes a data set, as `load_conversations` takes it.

    tokenizer: a folder or Hub id; with it tokens are counted, as a trainer encodes them into rows of `row_length`; document: as
    `encode_places` takes it. Raises ValueError for data or a tokenizer that a trainer would refuse.
    """
    reader = load_tokenizer(tokenizer, None, trust_remote_code) if tokenizer else None
    noted, roles, kinds, hashes = [], Counter(), Counter(), []
    sizes = {"answers": [], "characters": [], "characters of answers": []}
    texts = document == "text"
    source = Source(data, noted.append, texts=texts)
    for messages in tqdm(source, desc="reading", unit=" conversations"):
        answers = [message for message in messages if message["role"] == "assistant"]
        lengths = [len(message["content"]) for message in messages]
        roles.update(message["role"] for message in messages)
        kinds.update(_kinds(messages, answers))
        hashes.append(hash_of_conversation(messages))
        sizes["answers"].append(len(answers))
        sizes["characters"].append(sum(lengths))
        sizes["characters of answers"].append(sum(len(answer["content"]) for answer in answers))
    if texts:
        sizes = {"characters": sizes["characters"]}
    found = {
        "data": data,
        "conversations": source.count,
        "messages": dict(roles.most_common()),
        "conversations with": {"the same words as another": len(hashes) - len(set(hashes)), **kinds},
        "sizes": {name: _distribution(values) for name, values in sizes.items()},
        "notes": noted,
    }
    if reader is not None:
        found |= _tokens(reader, source, row_length, document, found["sizes"], noted)
    return found


def _kinds(messages, answers):
    """What is special about a conversation."""
    if messages[0]["role"] == "system":
        yield "a system message"
    if "tools" in messages[0]:
        yield "tools"
    for name, what in (("tool_calls", "calls of tools"), ("reasoning_content", "thoughts")):
        if any(name in answer for answer in answers):
            yield what
    if any(answer.get("weight") == 0 for answer in answers):
        yield "an answer of weight 0"
    if any(map(is_cut, answers)):
        yield "an answer that was cut off"


def _tokens(tokenizer, source, row_length, document, sizes, noted):
    how = {"rules": 2, "document": document, "row_length": row_length, "total": source.count, "workers": num_workers()}
    documents, places = encode_places(tokenizer, source, True, note=noted.append, **how)
    supervised = documents.count_supervised(0, np.iinfo(np.int32).max)
    sizes["tokens"], sizes["supervised tokens"] = _distribution(documents.lengths), _distribution(supervised)
    packed = lay_out(documents, row_length)
    labels = packed.count_labels()
    rows = packed.keep(labels > 0)  # a trainer leaves the others out
    cut = np.maximum(documents.lengths - row_length, 0).sum()
    return {
        "encoded": len(np.unique(places)),
        "documents": len(documents),
        "supervised share": round(int(supervised.sum()) / max(int(documents.lengths.sum()), 1), 4),
        "rows": {
            "row_length": row_length,
            "rows": len(rows),
            "padding share": round(1 - rows.count_tokens(slice(None)) / max(len(rows) * row_length, 1), 4),
            "longer than a row": rows.num_cut,
            "tokens cut off": int(cut),
            "labels": int(labels.sum()),
        },
    }


def _distribution(values):
    values = np.asarray(values)
    quantiles = np.quantile(values, list(QUANTILES.values()), method="nearest").tolist()
    return dict(zip(QUANTILES, map(int, quantiles))) | {"sum": int(values.sum())}


def survey_text(found):
    """The survey as text."""
    texts = "text" in found["messages"]
    lines = [f"{found['data']}: {found['conversations']:,} {'texts' if texts else 'conversations'}"]
    roles = ", ".join(f"{count:,} {role}" for role, count in found["messages"].items())
    lines += [] if texts else [f"messages: {roles}"]
    kinds = {what: count for what, count in found["conversations with"].items() if count}
    if kinds:
        lines.append(
            ("texts with " if texts else "conversations with ")
            + "; ".join(f"{what}: {count:,}" for what, count in kinds.items())
        )
    titles = [*QUANTILES, "sum"]
    lines += ["", " " * 22 + "".join(f"{title:>14}" for title in titles)]
    for name, row in found["sizes"].items():
        lines.append(f"{name:<22}" + "".join(f"{row[title]:>14,}" for title in titles))
    if "rows" in found:
        rows = found["rows"]
        lines += [
            "",
            f"{found['supervised share']:.1%} of the tokens are supervised.",
            f"{rows['rows']:,} rows of {rows['row_length']} tokens hold {rows['labels']:,} labels, and {rows['padding share']:.1%} "
            "padding.",
            f"{found['documents']:,} documents; {rows['longer than a row']:,} are longer than a row and lose "
            f"{rows['tokens cut off']:,} tokens.",
        ]
    return "\n".join([*lines, *(f"\n{note}" for note in found["notes"])])


def survey_sets(data, tokenizer, row_length, **how):
    """The survey of each data set that `data` names, with its share of an epoch: {"data", "sets"}."""
    sets, found = data_sets(data), []
    for one in sets:
        found.append(survey(one.name, tokenizer, row_length, **how))
    weights = [one.weight for one in sets]
    if tokenizer:
        sizes = [one["rows"]["rows"] for one in found]
        for one, count, size in zip(found, rows_per_epoch(sizes, weights).tolist(), sizes):
            one["epoch"] = {
                "rows": count,
                "share": count / sum(sizes),
                "passes": round(count / max(size, 1), 2),
            }
    elif None not in weights:
        for one, weight in zip(found, weights):
            one["epoch"] = {"share": weight / sum(weights)}
    return {"data": data, "sets": found}


def _epoch_text(one):
    epoch = one["epoch"]
    rows = f", {epoch['rows']:,} rows, {epoch['passes']:.2f} times its own" if "rows" in epoch else ""
    return f"{one['data']}: {epoch['share']:.1%} of an epoch{rows}"


def print_survey(data, tokenizer, row_length, *, as_json, **how):
    """Print the survey of a data set, or of several, as text or as one JSON object."""
    if len(data_sets(data)) > 1:
        found = survey_sets(data, tokenizer, row_length, **how)
        told = [
            *map(survey_text, found["sets"]),
            "\n".join(_epoch_text(one) for one in found["sets"] if "epoch" in one),
        ]
        print(json.dumps(found, ensure_ascii=False) if as_json else "\n\n".join(filter(None, told)))
        return
    found = survey(data, tokenizer, row_length, **how)
    print(json.dumps(found, ensure_ascii=False) if as_json else survey_text(found))
