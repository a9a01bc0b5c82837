"""The measurement that chose a tree (tree_measurement.py), in words. No torch."""

from ..inference.speculation.tree import expected_acceptance_length


def outcome(tree, found, rates, choice, num_prompts):
    """The text that `headstart tree` prints.  found: of measure_acceptance; choice: as save_tree takes it, or None"""
    drafted, measured = len(found["per_position"]), found["acceptance_length"]
    lines = [
        tree.draw(),
        f"on these {num_prompts} prompts: chain of {drafted}: {measured:.2f} tokens per step, measured;",
    ]
    if choice is None:
        promised = expected_acceptance_length(tree, rates)
        lines.append(f"tree of {tree.num_nodes} nodes: {promised:.2f}, expected from the rates")
    else:
        lines += [choice_table(choice), choice_sentence(choice)]
    return "\n".join(lines)


def choice_sentence(choice):
    """A sentence on the chosen tree and its speed, or on plain decoding if that is faster.  choice: of a tree file"""
    chosen, plain, best = choice["chosen"], choice["trials"][0], choice["best_static"]
    where = f"batch size {choice['batch_size']} on {choice['hardware']}"
    tree = f"the {chosen['draft']} tree of {chosen['num_nodes']} nodes, {chosen['depth']} deep,"
    speed, without = chosen["tokens_per_second"], plain["tokens_per_second"]
    if speed <= without:
        return (
            f"At {where} plain decoding is faster than any tree: {without:,.0f} tokens/s, and {speed:,.0f} with the best of them, "
            f"{tree.rstrip(',')}. Decode without this draft there."
        )
    static = choice["trials"][1]
    over = ""
    if chosen["draft"] == "dynamic":
        over = f" The best static tree, of {best['num_nodes']} nodes, made {static['tokens_per_second']:,.0f}."
    return (
        f"At {where} {tree} decodes fastest: {speed:,.0f} tokens/s at {chosen['acceptance_length']:.2f} tokens per step, "
        f"{speed / without:.2f} times plain decoding, on held-out prompts.{over}"
    )


def choice_table(choice):
    """The trials, one line each.  choice: of a tree file"""
    lines = ["draft    nodes  deep  tokens/step  tokens/s"]
    for trial in choice["trials"]:
        numbers = f"{trial['num_nodes']:5}  {trial['depth']:4}  {trial['acceptance_length']:11.2f}"
        mark = "  <- chosen" if trial == choice["chosen"] else ""
        lines.append(f"{trial['draft']:7}  {numbers}  {trial['tokens_per_second']:8,.0f}{mark}")
    return "\n".join(lines)
