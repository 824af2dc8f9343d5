"""Host crew: threads that update what rests on the host, beside everything else. Each has a core and takes up the next piece
when it is done with one: none waits for another, as in a loop that is divided among threads, where the slowest sets the pace."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from naught.streams import stand_on

__all__ = ["Crew", "HostCrew", "cores_of"]

_LOG = logging.getLogger("naught")
_NICE = 10  # how far a thread steps back before others on its core
_HOST = torch.device("cpu")
_PATIENCE_S = 60.0  # at the end of a process
_SPARE = 8  # of so many cores one is left to the threads that ask the device


def cores_of(place: int, ranks: int) -> list[int]:
    """The cores that one of the ranks of this host updates with: as many for each, and none for two."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    first = place * share % len(cores)
    return cores[first : first + max(1, share - -(-share // _SPARE))]


class Crew(Protocol):
    """Does jobs one after the other."""

    def ask(self, pieces: int, do: Callable[[int], None]) -> Future[None]:
        """Have something done to each of so many pieces."""

    def scratch(self, numel: int) -> Tensor:
        """Memory of whoever asks, until the next time."""

    def stop(self) -> None:
        """Once all is done that was asked."""


_CREWS: weakref.WeakSet[HostCrew] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A process does not end in the middle of an update, unless that takes too long: it may wait for a device that waits for a
    rank which has died."""
    crews, until = list(_CREWS), time.monotonic() + _PATIENCE_S
    for crew in crews:
        crew.queue.stop()
    if not all([crew.stops_by(until) for crew in crews]):
        _LOG.warning(
            "updates on the host were not over within %g s of the end of the process, which ends without them", _PATIENCE_S
        )


class _Job:
    """Pieces that any thread may take up, in their order; the last one that is done ends the job."""

    def __init__(self, pieces: int, do: Callable[[int], None]) -> None:
        self.do, self.pieces = do, pieces
        self.begun = self.ended = 0
        self.fault: BaseException | None = None
        self.over: Future[None] = Future()


class _Queue:
    """Jobs in their order. Threads hold this alone, so that a crew which nobody has any more ends."""

    def __init__(self) -> None:
        self.jobs: deque[_Job] = deque()
        self.changed = threading.Condition()
        self.stopped = False

    def put(self, job: _Job) -> None:
        with self.changed:
            assert not self.stopped, "a crew that was stopped does nothing"
            self.jobs.append(job)
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def take(self) -> tuple[_Job, int] | None:
        """The next piece; None: there will be none."""
        with self.changed:
            while not self.jobs:
                if self.stopped:
                    return None
                self.changed.wait()
            job = self.jobs[0]
            job.begun += 1
            if job.begun == job.pieces:
                self.jobs.popleft()
            return job, job.begun - 1

    def do_one(self) -> bool:
        """Whether there was one more piece to do."""
        taken = self.take()
        if taken is None:
            return False
        job, piece = taken
        try:
            job.do(piece)
        except BaseException as error:  # whoever waits for the job is told
            job.fault = job.fault or error
        with self.changed:
            job.ended += 1
            over = job.ended == job.pieces
        if over and job.fault is not None:
            job.over.set_exception(job.fault)
        elif over:
            job.over.set_result(None)
        return True


class HostCrew:
    """Does jobs one after the other, beside a device. Each thread has a core, or, for None, is on any of them. Without any it is
    one thread: where training itself needs the cores."""

    def __init__(self, cores: Sequence[int | None] | None, device: torch.device = _HOST) -> None:
        self.cores, self.device, self.queue = cores, device, _Queue()
        self.own = threading.local()
        self.threads: list[threading.Thread] = []
        weakref.finalize(self, self.queue.stop)
        _CREWS.add(self)

    def ask(self, pieces: int, do: Callable[[int], None]) -> Future[None]:
        """Have something done to each of so many pieces; returns at once."""
        job = _Job(pieces, do)
        if not pieces:
            job.over.set_result(None)
            return job.over
        self.queue.put(job)
        if not self.threads:
            self._hire()
        return job.over

    def scratch(self, numel: int) -> Tensor:
        """Memory of the thread that asks, until it asks again."""
        room: Tensor | None = getattr(self.own, "room", None)
        if room is None or room.numel() < numel:
            room = self.own.room = torch.empty(numel)
        return room[:numel]

    def stop(self) -> None:
        """Once all is done that was asked."""
        self.stops_by(None)

    def stops_by(self, until: float | None) -> bool:
        """The same; whether all of it is done by then. None: whenever that is."""
        self.queue.stop()
        for thread in self.threads:
            thread.join(None if until is None else max(0.1, until - time.monotonic()))
        over = not any(thread.is_alive() for thread in self.threads)
        self.threads.clear()
        return over

    def _hire(self) -> None:
        before = torch.get_num_threads()
        wanted: Sequence[int | None] = self.cores or [None]
        ready = threading.Barrier(1 + len(wanted))
        try:
            for core in wanted:
                args = (self.queue, core, self.device, ready, len(wanted) == 1 and core is None)
                thread = threading.Thread(target=_serve, args=args, name="naught-update", daemon=True)
                thread.start()
                self.threads.append(thread)
            ready.wait()
        except BaseException:  # no more threads are to be had: those that there are do not wait for them
            ready.abort()
            self.queue.stop()
            raise
        if self.cores:
            torch.set_num_threads(before)  # a thread's own number stays; but some libraries have one for all


def _serve(queue: _Queue, core: int | None, device: torch.device, ready: threading.Barrier, alone: bool) -> None:
    try:
        if core is not None:
            _keep_to(core)
        stand_on(device)
        if not alone:  # else it has as many threads as training
            torch.get_num_threads()  # a thread that has not asked yet takes up the process's number in its first loop
            torch.set_num_threads(1)
    except BaseException:
        ready.abort()
        raise
    try:
        ready.wait()
    except threading.BrokenBarrierError:  # whoever hires is told
        return
    while queue.do_one():
        pass


def _keep_to(core: int) -> None:
    """Have this thread on one core, behind others there: who asks the device must not wait for it. Without this a forward beside
    an update takes several times as long."""
    me = (os.PRIO_PROCESS, threading.get_native_id())
    try:
        os.sched_setaffinity(0, {core})
        os.setpriority(*me, max(_NICE, os.getpriority(*me)))
    except OSError as error:  # some sandboxes allow neither
        _LOG.info("a thread that updates is not bound to core %d: %s", core, error)
