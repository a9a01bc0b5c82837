"""The drawings of a model card, SVG files beside it: acceptance, the draft tree, the loss. Each where its figures are there."""

from pathlib import Path

from ...evaluation.charts import as_file, heat_map, line_chart, tree_drawing

FOLDER = "plots"
# File -> what it shows; in the card's order.
CAPTIONS = {
    "acceptance.svg": "Acceptance per drafted token: the share of steps in which the first, second, … drafted token was accepted.",
    "rates.svg": "How often the target's token is the head's candidate of a rank, given that everything before it was accepted.",
    "tree.svg": "The draft tree, from the root downwards; the number is the rank among the siblings.",
    "loss.svg": "Training loss of each head, or of each step of a head that drafts step by step.",
    "training.svg": "Acceptance length while training.",
}


def write_plots(output, measured, source=None):
    """Draw what Measurements hold into output/plots; a drawing of an earlier export in `source` is kept where nothing is newer.

    Returns the names of the files, in the order of CAPTIONS.
    """
    drawings, written = _drawings(measured), []
    for name in CAPTIONS:
        earlier = None if source is None else Path(source, FOLDER, name)
        text = as_file(drawings[name])
        if not text and earlier is not None and earlier.is_file():
            text = earlier.read_text(encoding="utf-8")
        if text:
            Path(output, FOLDER).mkdir(exist_ok=True)
            Path(output, FOLDER, name).write_text(text, encoding="utf-8")
            written.append(name)
    return written


def _drawings(measured):
    """{file: an <svg>, or "" where there are no figures}"""
    by_temperature = [
        (f"temperature {one['temperature']:g}", list(enumerate(one["per_position"], start=1)))
        for one in measured.acceptance
    ]
    tree = measured.tree_content
    rates = tree.get("rates") or measured.rates
    lines = [line for line in measured.training if line.get("kind") == "train"]
    count = 0
    while any(f"head{count}_loss" in line for line in lines):
        count += 1
    losses = [
        (f"head {i}", [(line["step"], line[f"head{i}_loss"]) for line in lines if f"head{i}_loss" in line])
        for i in range(count)
    ] or [("", [(line["step"], line["loss"]) for line in lines if "loss" in line])]
    lengths = [
        (line["step"], line["acceptance_length"]) for line in measured.training if line.get("kind") == "acceptance"
    ]
    return {
        "acceptance.svg": line_chart(
            by_temperature,
            title="Acceptance per drafted token",
            x_label="drafted token",
            y_label="share of steps",
            start=0,
            y_max=1,
        ),
        "rates.svg": heat_map(rates, title="Acceptance per depth and rank") if rates and any(rates) else "",
        "tree.svg": tree_drawing(tree["parents"], tree["ranks"], rates, title="Draft tree")
        if "parents" in tree
        else "",
        "loss.svg": line_chart(losses, title="Training loss", y_label="loss"),
        "training.svg": line_chart(
            [("", lengths)] if len(lengths) > 1 else [], title="Acceptance length", y_label="tokens per step", start=1
        ),
    }
