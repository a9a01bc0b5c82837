"""The acceptance lines of a run's metrics.jsonl: which of them compare."""

from itertools import pairwise


def difference(before, now):
    """Why two acceptance lines do not compare; "" if they do. Those of older versions, without "measured_on", compare with all."""
    if before.get("source") != now.get("source"):
        return "one is the engine's figure, the other is teacher-forced"
    if "measured_on" in before and before["measured_on"] != now.get("measured_on"):
        return "the prompts (eval_data) or eval_tokens have changed"
    return ""


def breaks(lines):
    """The steps from which acceptance lines do not compare with those before them."""
    return [now["step"] for before, now in pairwise(lines) if difference(before, now)]
