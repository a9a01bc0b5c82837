"""Saver: a run's checkpoints and its best head, copied in between two steps and written while the training goes on.

All ranks call `save` and `leave` together; the main rank copies to its host's memory, and its thread writes. At most one write is
going on: the next copy waits for it.
"""

import time

from accelerate.utils import broadcast_object_list

from ..checkpointing import copy_checkpoint, copy_head_folder
from .best_head import forget_kept, write_best
from .checkpoint_writer import CheckpointWriter

GRACE = 20  # seconds in which a stopped run leaves, unless one checkpoint takes longer


class Saver:
    """saved_step: of the newest checkpoint that is written or being written, -1 before the first.

    run: the folder; adapter: a TargetAdapter, or None; num_kept, checksums: as copy_checkpoint takes them. then: called once, on
    the main rank, by the first call after what is being written is whole.
    """

    def __init__(self, run, accelerator, *, saved_step, num_kept, adapter, checksums):
        self.run, self.accelerator, self.adapter = run, accelerator, adapter
        self.saved_step, self.kept = saved_step, {"num_kept": num_kept, "checksums": checksums}
        self.writer, self.then = CheckpointWriter(), None

    def save(self, state, head, optimizer, *, checkpoint, best=None):
        """Begin to write a checkpoint of the state's step, unless there is one, and the head into best/.

        best: the figures of its acceptance.json, or None. Returns whether a checkpoint was begun, on the main rank. Raises what the
        write before raised.
        """
        checkpoint = checkpoint and state["step"] != self.saved_step
        write_head = write_checkpoint = None
        if self.accelerator.is_main_process and (checkpoint or best):
            self.wait()
            write_head = copy_head_folder(head, self.adapter)
        if checkpoint:
            self.saved_step = state["step"]
            write_checkpoint = copy_checkpoint(
                self.run, write_head, optimizer=optimizer, state=state, accelerator=self.accelerator, **self.kept
            )
        if write_head is None:
            return False

        def write():
            # In this order: a whole checkpoint finds the best head of its measurements.
            if best:
                write_best(self.run, write_head, best)
            if write_checkpoint:
                write_checkpoint()
                forget_kept(self.run)

        self.writer.start(write)
        return write_checkpoint is not None

    def check(self):
        """Raise the error of a write that has failed, without waiting for one that goes on."""
        if not self.writer.is_busy:
            self.wait()

    def wait(self):
        """Wait until all is written; raises the thread's error."""
        then, self.then = self.then, None
        self.writer.wait()
        if then:
            then()

    def leave(self, stop, save):
        """Save before a run ends that a signal stopped (StopSignals). What is being written is finished first.

        save(): saves this step, on all ranks. It is not called, and False returned, if a checkpoint was being written when the
        signal arrived and another takes more than GRACE: the run then goes on from that one, begun less than a write's time ago.
        """
        has_time = True
        if self.accelerator.is_main_process:
            self.wait()
            was_writing = 0 < stop.arrived < self.writer.ended
            has_time = not was_writing or time.monotonic() - stop.arrived + self.writer.longest <= GRACE
        (has_time,) = broadcast_object_list([has_time])
        if has_time:
            save()
        if self.accelerator.is_main_process:
            self.wait()
        self.accelerator.wait_for_everyone()
        return has_time
