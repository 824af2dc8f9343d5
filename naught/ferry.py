"""Ferry: between a device and its host, in lanes beside the device's own order and through staging of a constant size. What is
cast is cast by the device, which has time for it; the host's processor has not."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import torch
from torch import Tensor

from naught.block_norms import norms_of
from naught.flat import Meter
from naught.holding import Buffer
from naught.rooms import STRETCH_NUMEL
from naught.rounding import Rounds
from naught.staging import Staging
from naught.streams import Lane, Point, here

__all__ = ["Arrival", "Ferry", "Sent"]


class Sent(NamedTuple):
    """A sum that is on its way to the host: the norms of its blocks, and when it is there."""

    norms: list[Tensor]
    arrived: Point


class Ferry:
    """Carries sums of gradients down and weights up, through staging."""

    def __init__(self, staging: Staging, meter: Meter, *, apart: bool) -> None:
        device = staging.device
        self.device, self.down, self.up = device, Lane(device), Lane(device)
        self.rounding = Lane(device, urgent=True)  # else a cast of a moment waits for whole products of matrices
        self.apart = apart  # else all memory is one, and nothing is staged
        self.staging = staging
        self.lock = threading.Lock()  # around the landings, and what is coming
        self.coming: deque[tuple[Point, object]] = deque()  # what nobody else may have any more before it is there
        weakref.finalize(self, _let_arrive, self.down, self.up, self.rounding).atexit = False  # the driver may be gone by then
        self.meter = meter
        meter.change(Buffer.STAGING, self.staging.nbytes)

    def send(self, part: Tensor, home: Tensor, dtype: torch.dtype, *, onto: bool) -> Sent:
        """Bring a sum of a type to its home on the host, or add it to the one that is there. The part may be let go at once."""
        as_it_is = part.dtype == dtype and not onto
        norms = norms_of(part) if as_it_is else []
        # As much at a time as a berth holds: what is asked of the device seldom costs the host little.
        most = self.staging.piece_numel
        numel = most * 4 // home.itemsize if as_it_is else min(most, STRETCH_NUMEL)
        for piece, place in zip(_stretches(part, numel), _stretches(home, numel), strict=True):
            total = piece.to(dtype)
            if onto:
                self.meter.move("to the device", place.nbytes)
                total = place.to(self.device, non_blocking=True).to(dtype, copy=not self.apart).add_(total)
            if not as_it_is:
                norms += norms_of(total)
            self._land(total, place)
        return Sent(norms, self.down.point(asleep=True))  # a whole crew may wait for it, beside a backward

    def drain(self) -> None:
        """Until nothing travels that was asked for."""
        self.down.point().wait()
        self.up.point().wait()
        self.rounding.point().wait()

    def close(self) -> None:
        """Nothing travels any more."""
        self.drain()
        self.coming.clear()
        self.meter.change(Buffer.STAGING, -self.staging.nbytes)
        self.staging.clear()

    def _land(self, total: Tensor, place: Tensor) -> None:
        self.meter.move("to the host", place.nbytes)
        if not self.apart:
            place.copy_(total)
            return
        berth = self.staging.next_berth()
        berth.free.hold(self.device)
        staged = berth.of(total.numel(), place.dtype).copy_(total)
        self.down.follow(here(self.device))
        with self.down.open():
            place.copy_(staged, non_blocking=True)
        berth.free = self.down.point()

    def keep(self, arrival: object, point: Point) -> None:
        """Until it is there. Whoever has asked for it may be gone, and its memory must not be another's yet."""
        with self.lock:
            while self.coming and self.coming[0][0].reached:
                self.coming.popleft()
            if not point.reached:
                self.coming.append((point, arrival))

    def bring(self, source: Tensor, into: Tensor, after: Point, rounds: Rounds) -> Point:
        """Copy what rests on the host to the device, after a point of the device's order; any thread may ask."""
        self.meter.move("to the device", source.nbytes)
        if not self.apart:
            rounds(into, source)
            return after
        with self.lock:
            if source.dtype == into.dtype:
                self.up.follow(after)
                with self.up.open():
                    into.copy_(source, non_blocking=True)
                return self.up.point()
            self.rounding.follow(after)
            try:
                numel = self.staging.piece_numel
                for piece, place in zip(_stretches(source, numel), _stretches(into, numel), strict=True):
                    self._round(piece, place, rounds)
            except BaseException:  # whoever hears of it may let the memory go that is being written to
                self.up.point().wait()
                self.rounding.point().wait()
                raise
            return self.rounding.point()

    def _round(self, piece: Tensor, place: Tensor, rounds: Rounds) -> None:
        """While one landing is cast from, the next piece comes to another."""
        landing = self.staging.next_landing()
        self.up.follow(landing.free)
        with self.up.open():
            landed = landing.of(piece.numel(), piece.dtype).copy_(piece, non_blocking=True)
        self.rounding.follow(self.up.point())
        try:
            with self.rounding.open():
                rounds(place, landed)
        finally:
            landing.free = self.rounding.point()


def _let_arrive(*lanes: Lane) -> None:
    """A ferry that nobody has any more goes first, and all that travels is there before the memory goes that it comes to."""
    for lane in lanes:
        lane.point().wait()


def _stretches(tensor: Tensor, numel: int) -> Sequence[Tensor]:
    return torch.split(tensor, numel) if tensor.numel() else ()


class Arrival:
    """Weights that come up from the host, as soon as nobody updates them there any more. If they cannot be brought, for want of
    memory, they are brought again where they are waited for, if their source stays what it is."""

    def __init__(
        self, ferry: Ferry, source: Tensor, into: Tensor, updated: Future[None] | None, rounds: Rounds, *, stays: bool = True
    ) -> None:
        self.ferry, self.source, self.into, self.rounds = ferry, source, into, rounds
        self.updated, self.stays = updated, stays
        self.lock = threading.Lock()  # around bringing them again
        self.began = here(ferry.device)
        self.set_out: Future[Point] = Future()
        if updated is not None:
            updated.add_done_callback(self._set_out)
            return
        try:
            self.set_out.set_result(self._bring())
        except Exception as error:  # as if somebody else had asked
            self.set_out.set_exception(error.with_traceback(None))  # which has all that called this

    def _set_out(self, updated: Future[None]) -> None:
        """In whichever thread has updated them."""
        try:
            updated.result()
            point = self._bring()
            self.ferry.keep(self, point)
            self.set_out.set_result(point)
        except BaseException as error:  # whoever waits is told
            self.set_out.set_exception(error)

    def _bring(self) -> Point:
        return self.ferry.bring(self.source, self.into, self.began, self.rounds)

    def wait_here(self) -> None:
        """Keep the host until they are there, or have not come."""
        wait([self.set_out])
        with self.lock:
            arrived = None if self.set_out.exception() is not None else self.set_out.result()
        if arrived is not None:
            arrived.wait()

    def leave_source(self) -> None:
        """The same. From then on where they come from changes, and they are not brought again."""
        wait([self.set_out])
        with self.lock:
            self.stays = False
        self.wait_here()

    def wait(self) -> None:
        """From here on the device finds them."""
        updated = self.updated is None or self.updated.exception() is None
        wait([self.set_out])
        with self.lock:
            if self.stays and updated and self.set_out.exception() is not None:
                self.began = here(self.ferry.device)  # what was put in their place meanwhile is not to come after them
                again: Future[Point] = Future()
                again.set_result(self._bring())
                self.set_out = again
        self.set_out.result().hold(self.ferry.device)
