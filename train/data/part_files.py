"""PartFiles: several processes write one file together, record by record; the file appears whole or not at all.

    OUTPUT.partial/made_from.json      the settings of the file: going on with other settings is refused
    OUTPUT.partial/part-00000.jsonl    a line [index, record] per record of process 0
    OUTPUT                             all records, written when the last one is there

Every record is on its way to the disk when `append` returns. So a run killed at any moment can go on, with any number of processes;
a half-written last line is dropped. Not done here: sharing work while it runs.
"""

import json
import os
import shutil
from pathlib import Path

from ...heads.storage.atomic_write import staged_file, write_json


class PartFiles:
    """Opened by every process at the same point.

    output: the Path of the whole file; made_from: JSON values that decide its content; begun_with: further facts, kept from the
    first start on; processes: of accelerate (process_index, num_processes, is_main_process, wait_for_everyone).
    Raises ValueError if existing parts were made from something else, and for a damaged part.
    """

    def __init__(self, output, made_from, begun_with, processes):
        self.output, self.processes = Path(output), processes
        self.folder = _folder(self.output)
        facts = self.folder / "made_from.json"
        if processes.is_main_process and not (facts.exists() and self._read()):  # there is nothing yet to go on with
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(facts, {"made_from": made_from, "begun_with": begun_with})
        processes.wait_for_everyone()
        facts = json.loads(facts.read_text(encoding="utf-8"))
        self.made_from, self.begun_with = facts["made_from"], facts["begun_with"]
        if changed := differences(self.made_from, made_from):
            raise ValueError(
                f"{self.folder} was begun with other settings ({changed}): go on with those, name a new output, or remove "
                "the folder"
            )
        self.done = self._read()  # {index: record} of earlier starts
        processes.wait_for_everyone()  # no process reads what another has begun to write
        path = self.folder / f"part-{processes.process_index:05d}.jsonl"
        drop_half_line(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as this object

    def share(self, indices):
        """This process's share of the `indices` that are still to make."""
        missing = [index for index in indices if index not in self.done]
        return missing[self.processes.process_index :: self.processes.num_processes]

    def append(self, index, record):
        self._file.write((json.dumps([index, record], ensure_ascii=False) + "\n").encode("utf-8", "replace"))

    def collect(self):
        """Wait for all processes. Returns {index: record} of all of them on the main process, and only that may then `finish`."""
        self._file.close()
        self.processes.wait_for_everyone()
        return self._read() if self.processes.is_main_process else {}

    def finish(self, lines):
        """Write the whole file from these lines, and remove the parts."""
        whole = self.folder / "whole.jsonl"  # in the folder: a killed process's file is removed with the parts
        with staged_file(whole) as file:
            file.writelines((line + "\n").encode("utf-8") for line in lines)
        whole.replace(self.output)
        self.remove()

    def remove(self):
        """Remove the parts."""
        self._file.close()
        forget_parts(self.output)

    def _read(self):
        records = {}
        for path in sorted(self.folder.glob("part-*.jsonl")):
            whole, _, _ = path.read_bytes().rpartition(b"\n")
            for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
                try:
                    index, record = json.loads(line)
                except ValueError:
                    raise ValueError(
                        f"{path}, line {number} is damaged: {line[:80]!r}; remove the line, or the file to make its records anew"
                    ) from None
                records[index] = record
        return records


def _folder(output):
    return output.with_name(f"{output.name}.partial")


def forget_parts(output):
    """Remove the parts of a file, if there are any."""
    if _folder(output).exists():
        shutil.rmtree(_folder(output))


def differences(old, new):
    """The differences of two dicts as a text: "seed: 0, now 1; ..."."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return "; ".join(f"{name}: {old.get(name)!r}, now {new.get(name)!r}" for name in names)


def drop_half_line(path):
    """Cut a file, if it exists, after its last line end."""
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)
