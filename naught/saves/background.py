"""Background: a save that goes on while an engine trains. Its outcome is told on every rank, sooner or later, and never lost."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
from multiprocessing.util import Finalize
from queue import SimpleQueue

import torch

from naught.comm import Group, Mail
from naught.flat import Meter
from naught.saves.saving import Save, undone_on_error, write
from naught.saves.snapshot import Snapshot, refuse_too_large

__all__ = ["Background"]

_LOG = logging.getLogger("naught")
_PATIENCE_S = 1800.0  # for peers whose disk is slower
_NAP_S = 0.02
_CATEGORY = "snapshots"  # of the meter


class Background:
    """Runs one save at a time. Every rank does the same calls in the same order."""

    def __init__(self, group: Group, device: torch.device, meter: Meter) -> None:
        self.group, self.device, self.meter = group, device, meter
        self.running: _Running | None = None  # None: nothing is being saved

    def start(self, save: Save) -> None:
        """Copy what must be copied now, and write beside training."""
        running: _Running | None = None
        try:
            running = self._begin(save)
            with undone_on_error(save, self.group), self.group.together():
                running.start()
        except BaseException:
            if running is not None:
                running.go.put(False)
            raise
        running.go.put(True)
        self.running = running
        self.meter.change(_CATEGORY, running.snapshot.nbytes)

    def _begin(self, save: Save) -> _Running:
        with undone_on_error(save, self.group):
            here = self._bytes_on_this_host(sum(tensor.nbytes for tensor, _ in save.tensors))
            with self.group.together():
                refuse_too_large(here)
                mail = Mail(self.group.rank, self.group.size, name=save.manifest.save, patience_s=_PATIENCE_S)
                return _Running(save, Snapshot(save.tensors, self.device), mail)

    def _bytes_on_this_host(self, nbytes: int) -> int:
        """Of the snapshots of all ranks that share its memory."""
        host = socket.gethostname()
        told = [text.rpartition(" ") for text in self.group.exchange_texts(f"{host} {nbytes}")]
        return sum(int(count) for other, _, count in told if other == host)

    def settle(self) -> None:
        """Wait until nothing is copied any more. What changes states comes here first."""
        if self.running is not None:
            self.running.snapshot.settled.wait()

    def look(self) -> None:
        """After a step: if the save is over on every rank, say how it went."""
        if self.running is not None and self._is_over(self.running):
            self.wait()

    def wait(self) -> None:
        """Wait until the save is over. If it has failed, that is raised on every rank."""
        if self.running is None:
            return
        running = self.running
        while not self._is_over(running):
            running.join(_NAP_S)
        self.running = None
        self.meter.change(_CATEGORY, -running.snapshot.nbytes)
        error = running.error()
        if self.group.alive:
            self.group.raise_together(error)
        elif error is not None:
            raise error

    def _is_over(self, running: _Running) -> bool:
        """On every rank. One that has died is noticed here."""
        if not self.group.alive:  # a script that is about to end: each rank by itself
            return not running.is_alive()
        try:
            return bool(self.group.exchange(torch.tensor([not running.is_alive()], dtype=torch.int64)).all())
        except BaseException:
            running.mail.give_up()
            raise


class _Running(threading.Thread):
    """The thread of a save. A script that ends waits for it."""

    def __init__(self, save: Save, snapshot: Snapshot, mail: Mail) -> None:
        super().__init__(name=f"naught-save-{save.draft.tag}")
        self.save, self.snapshot, self.mail = save, snapshot, mail
        self.go: SimpleQueue[bool] = SimpleQueue()  # whether all ranks have such a thread

    def run(self) -> None:
        if not self.go.get():
            return
        try:
            write(self.save, self.mail, self.snapshot.bytes)
        except BaseException as error:
            _UNTOLD[self] = error
            _LOG.error("the checkpoint %s is not saved: %s", self.save.draft.tag, error)
        finally:
            self.snapshot.let_go()
            self.mail.farewell()

    def error(self) -> Exception | None:
        """What went wrong. From here on the caller tells it."""
        error = _UNTOLD.pop(self, None)
        if error is not None and not isinstance(error, Exception):
            raise error
        return error


# What went wrong in threads, until somebody has been told.
_UNTOLD: dict[threading.Thread, BaseException] = {}


def _tell_at_the_end() -> None:
    """A script that ended without asking must not look as if its last save had been fine."""
    for error in _UNTOLD.values():
        _LOG.error("a checkpoint that was being saved when the script ended is not there: %s", error)
    if _UNTOLD:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # nothing else changes the status of a process that is ending


atexit.register(_tell_at_the_end)
Finalize(None, _tell_at_the_end, exitpriority=0)  # processes that multiprocessing forks end without the other
