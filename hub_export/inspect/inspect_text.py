"""What `headstart inspect` found (inspect_head.py), in lines: what is wrong, what the head is, who takes it. No torch."""

import textwrap

WIDTH = 118
INDENT = 12  # of values behind their names
NAME, ANSWER = 28, 9  # columns of the engines


def as_text(found):
    """The lines of a description.  found: of inspect_head.describe"""
    lines = [f"{found['source']}: {_what(found)}"]
    lines += _wrong(found)
    lines.append("")
    for name, value in _facts(found):
        lines += textwrap.wrap(f"{name:{INDENT}}{value}", WIDTH, subsequent_indent=" " * INDENT)
    lines += ["", "engines, and these files as they lie"]
    for engine in found["engines"]:
        lines += _engine(engine)
    return "\n".join(lines)


def _what(found):
    config, family = found["config"], found["family"]
    if family == "Medusa":
        blocks = "1 block" if config["num_layers"] == 1 else f"{config['num_layers']} blocks"
        return f"Medusa, {config['num_heads']} heads of {blocks}"
    if family == "MLP speculator":
        return f"MLP speculator, {config['num_steps']} steps, weights {'tied' if config['tie_weights'] else 'of their own'}"
    return f"{family} head"


def _wrong(found):
    """What is to be seen first: where the file lies, does not fit, or would be computed wrong without a word."""
    silent = [f"{_short(one)}: {text}" for one in found["engines"] for text in one["silent"]]
    lines = []
    for title, texts in (
        ("wrong", found["problems"]),
        ("loads there, and drafts worse than it could without a word", silent),
    ):
        if texts:
            lines += ["", title]
            for text in texts:
                lines += textwrap.wrap(f"! {text}", WIDTH, initial_indent="  ", subsequent_indent="    ")
        if title == "wrong" and found["mend"]:
            lines.append(f"    a config.json that says what the tensors say: {found['mend']}")
    return lines


def _facts(found):
    files = ", ".join(f"{one['name']} ({_bytes(one['bytes'])})" for one in found["files"])
    also = [name for name in found["beside"] if name.endswith((".safetensors", ".pt", ".bin"))]
    yield "format", f"{found['format']}, {found['dtype']}: {files}" + (f"; also {', '.join(also)}" if also else "")
    if found["folder"] != found["source"]:
        yield "folder", found["folder"]
    yield "target", _target(found)
    if found["adapter"]:
        yield "adapter", f"trained together with the adapter {found['adapter']} of its target"
    yield "reads", _features(found["features"])
    yield "sizes", _sizes(found)
    embedding = f"; embedding: {found['embedding']}" if found["embedding"] else ""
    yield "lm_head", found["lm_head"] + embedding
    parameters = found["parameters"]
    carried = f", and {parameters['carried']:,} of the target's carried along" if parameters["carried"] else ""
    yield "parameters", f"{parameters['trained']:,} trained{carried}"
    yield "draft", _draft(found)
    tree = found["tree"]
    beside = f"{tree['kind']}, {tree['num_nodes']} nodes, {tree['max_depth']} deep ({tree['file']})" if tree else None
    yield "tree", beside or f"none beside it (it drafts a chain of {found['num_speculative_tokens']})"
    yield "measured", _measured(found["measured"])


def _target(found):
    target = found["target"]
    if not target["name"]:
        return target["why"]
    if target["fits"]:
        return f"{target['name']}: it fits"
    return f"{target['name']}: {'IT DOES NOT FIT, see above' if target['fits'] is False else target['why']}"


def _features(features):
    if features["kind"] == "final":
        return "the target's last hidden state, after the final norm"
    ids = features["entering_layers"]
    if ids is None:
        return (
            "what enters the target's layers 2, n//2, n-3 (the file names none, and the target's depth n is not known)"
        )
    less = [id - 1 for id in ids]
    named = "" if features["named_by_file"] else "; the file names none, these are the default"
    counted = f"(vLLM, transformers' hidden_states: the same; SGLang: {_list(less)})"
    return f"what enters the target's layers {_list(ids)} {counted}{named}"


def _list(numbers):
    return ", ".join(map(str, numbers))


def _sizes(found):
    config = found["config"]
    parts = [f"hidden {config['hidden_size']}"]
    if config.get("target_hidden_size", config["hidden_size"]) != config["hidden_size"]:
        parts.append(f"target's hidden {config['target_hidden_size']}")
    parts.append(f"vocabulary {config['vocab_size']}")
    if "draft_vocab_size" in config:
        whole = config["draft_vocab_size"] == config["vocab_size"]
        parts.append("all of it drafted" if whole else f"{config['draft_vocab_size']} of it drafted")
    if "inner_size" in config:
        parts += [f"inner {config['inner_size']}", f"scale_input {str(config['scale_input']).lower()}"]
    if "head_dim" in config:
        heads = f"{config['num_attention_heads']} heads over {config['num_key_value_heads']} of {config['head_dim']}"
        scaling = (config["rope_scaling"] or {}).get("rope_type")
        rope = f"rope {config['rope_theta']:g}{f' ({scaling})' if scaling else ''}"
        parts += [f"MLP {config['intermediate_size']}", heads, rope]
        parts += [name for name in ("attention_bias", "fc_bias", "norm_before_residual") if config.get(name)]
    return ", ".join(parts)


def _draft(found):
    read, lm_head = found["draft_bytes"], found["draft_bytes"]["target_lm_head"]
    of_target = f" ({_bytes(lm_head)} of them the target's lm_head)" if lm_head else ""
    if "level" not in read:
        depth = found["num_speculative_tokens"]
        return f"reads {_bytes(read['first'])} of weights{of_target} for all {depth} depths at once"
    after = f", after a step {_bytes(read['advance'])}" if "advance" in read else ""
    return f"a level reads {_bytes(read['level'])} of weights{of_target}, the first {_bytes(read['first'])}{after}"


def _measured(measured):
    parts = [] if measured["step"] is None else [f"checkpoint of step {measured['step']}"]
    for one in measured.get("acceptance") or ():
        rates = ", ".join(f"{rate:.2f}" for rate in one["per_position"] or ())
        how = "" if one["source"] == "engine" else ", teacher-forced"
        length = "unknown" if one["acceptance_length"] is None else f"{one['acceptance_length']:.2f}"
        parts.append(f"acceptance length {length} at temperature {one['temperature']:g}{how} (per position {rates})")
    if not measured.get("acceptance"):
        parts.append("no acceptance beside it")
    rows = [row for row in (measured.get("benchmark") or {}).get("rows") or () if row.get("speedup")]
    if rows:
        best = max(rows, key=lambda row: row["speedup"])
        parts.append(f"at best {best['speedup']:.2f} times plain decoding ({measured['benchmark'].get('hardware')})")
    return "; ".join(parts)


def _engine(engine):
    answer = "no" if not engine["loads"] else "yes, but" if engine["problems"] else "yes"
    texts = engine["notes"] if engine["loads"] else engine["problems"] or [engine["how"]]
    if engine["loads"]:
        how = engine["how"].removeprefix("yes").removeprefix(", ")
        texts = [*([how] if how else []), *(["see above"] if engine["silent"] else []), *texts]
    before = 2 + NAME + ANSWER
    lines = textwrap.wrap("; ".join(texts), WIDTH - before) or [""]
    if engine["mend"]:
        lines.append(engine["mend"])  # to be copied: never broken
    if engine["stays"]:
        lines += textwrap.wrap(f"(what stays: {'; '.join(engine['stays'])})", WIDTH - before)
    lines[0] = f"  {_short(engine):{NAME}}{answer:{ANSWER}}{lines[0]}".rstrip()
    return [lines[0], *(" " * before + line for line in lines[1:])]


def _short(engine):
    return engine["name"].removeprefix("the ").split(" (")[0]


def _bytes(count):
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
