"""The shapes in which a record of instruction data holds its turns. (conversations.py reads the turns.)

    {"messages": [{"role": "user", "content": ...}, ...]}                        OpenAI
    {"conversations": [{"from": "human", "value": ...}, ...]}                    ShareGPT
    {"prompt": ..., "completion": ...}                                           TRL: texts, or lists of messages
    {"instruction": ..., "input": ..., "output": ..., "system": ...}             Alpaca; input and system may be missing

A record of several shapes has the first of them.
"""

SHAPES = (
    "a list under 'messages' (role/content) or 'conversations' (from/value), 'prompt' and 'completion', or 'instruction' and "
    "'output'"
)


def turns_of(record) -> list | None:
    """The turns of a record, not looked at any further; None if it has none of the shapes, or no turn."""
    if not isinstance(record, dict):
        return None
    turns = record.get("messages") or record.get("conversations")
    if turns is None or turns == []:
        turns = _prompt_and_completion(record) or _instruction_and_output(record)
    return turns if isinstance(turns, list) and turns else None


def _prompt_and_completion(record) -> list | None:
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return [_turn("user", prompt), _turn("assistant", completion)]
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    return None


def _instruction_and_output(record) -> list | None:
    instruction, output = record.get("instruction"), record.get("output")
    if not isinstance(instruction, str) or not isinstance(output, str):
        return None
    more, system = record.get("input"), record.get("system")
    if isinstance(more, str) and more.strip():
        instruction = f"{instruction}\n\n{more}"
    before = [_turn("system", system)] if isinstance(system, str) and system.strip() else []
    return [*before, _turn("user", instruction), _turn("assistant", output)]


def _turn(role, content):
    return {"role": role, "content": content}
