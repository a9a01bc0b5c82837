"""Outputs of the embedded target with a head, for test_pull.py and for the process that it starts, which imports nothing else."""

from pathlib import Path

from headstart import LLM, SamplingParams

TARGET = Path(__file__).resolve().parents[2] / "assets" / "stdlib-coder"


def coded(head):
    """[tokens, number of steps, nodes of the tree]"""
    config = {"model": head, "tree": "static"}
    llm = LLM(str(TARGET), dtype="float32", speculative_config=config)
    [one] = llm.generate(["def read(path):"], SamplingParams(temperature=0.0, max_tokens=16))
    return [one.outputs[0].token_ids, one.outputs[0].spec_decode_metrics.num_steps, llm.tree.num_nodes]
