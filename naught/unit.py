"""Unit: the segments of one block and the verbs on them. Each verb is written once, for every placement.

A unit knows what it holds; it does not know when anything should happen. That is the schedule's business.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from naught.comm import Pending, Seat
from naught.placement import Placement
from naught.segment import Segment
from naught.steps import UnitBytes

__all__ = ["Unit"]


class Unit:
    """A block's segments, and whether its weights can be used. New weights of a lazy one are gathered where they are used, and
    not before."""

    def __init__(self, name: str, segments: Sequence[Segment], placement: Placement, *, lazy: bool) -> None:
        self.name, self.segments, self.placement = name, list(segments), placement
        self.lazy = lazy and placement.optim.split and not placement.param.split
        self.remote = any(segment.remote for segment in self.segments)  # updated on the host
        self.trained = [segment for segment in self.segments if segment.trained]
        # What a gather brings: everything that is split, and of whole weights those that updates change.
        self.absentees = (
            [segment for segment in self.segments if segment.weights.split] if placement.param.split else self.trained
        )
        self.gathered_bytes = sum(segment.weights.flat.nbytes for segment in self.absentees)
        self.present = not placement.param.split or not self.absentees
        self.pending: list[Pending] = []

    def sizes(self) -> UnitBytes:
        held = (
            [segment for segment in self.absentees if not segment.weights.stays] if self.placement.param.split else self.segments
        )
        weights = sum(segment.weights.flat.nbytes for segment in held)
        grads = sum(segment.grads.flat.nbytes for segment in self.trained)
        return UnitBytes(
            weights=weights,
            weight_shard=sum(segment.weights.shard_bytes for segment in self.segments),
            grads=grads,
            grad_shard=sum(segment.grads.owned_bytes for segment in self.trained),
            state_shard=0,  # no plan of a pass moves states
            reduce_scratch=sum(segment.grads.scratch_bytes for segment in self.trained),
            trained=bool(self.trained),
        )

    def read(self) -> None:
        """Start to read what rests on disk, ahead of its gather."""
        if not self.present and not self.pending:
            for segment in self.absentees:
                segment.source.read()

    def drop_reading(self) -> None:
        for segment in self.absentees:
            segment.source.drop()

    def gather(self) -> None:
        """Start to make the weights whole, if they are not."""
        if not self.present and not self.pending:
            try:
                for segment in self.absentees:
                    self.pending.append(segment.start_gather(self.name))
            except BaseException:  # a flat has no memory, say: those of the others are not wanted by themselves
                self._forget_gather()
                raise

    def join(self) -> None:
        """Take part in a gather that another rank needs, also if this one has the weights."""
        if self.present or self.pending:
            self.ready()
            for segment in self.absentees:
                segment.start_gather(self.name).wait()
        else:
            self.make_whole()

    def make_whole(self) -> None:
        """Make the weights whole, and wait until they are."""
        self.gather()
        self.ready()

    def ready(self) -> None:
        """Wait for the gather that is under way, if one is: from here on the weights can be used."""
        if self.pending:
            for pending in self.pending:
                pending.wait()
            self.pending.clear()
            for segment in self.absentees:
                segment.weights.bind()
            self.present = True

    def release(self) -> None:
        if self.placement.param.split and (self.present or self.pending):
            self.ready()
            for segment in self.absentees:
                segment.weights.release()
            self.present = not self.absentees

    def give_up(self) -> None:
        """Wait for what is under way, let gradients go, and release. Of a gather that fails whoever gathers next is told."""
        for segment in self.trained:
            segment.grads.give_up()
        if any([pending.fails() for pending in self.pending]):
            self._forget_gather()
        else:
            self.ready()
            self.release()

    def _forget_gather(self) -> None:
        for pending in self.pending:  # all of them: a flat is not freed while something comes to it
            pending.fails()
        self.pending.clear()
        for segment in self.absentees:
            segment.weights.release()

    def outdate(self, *, hide: bool) -> None:
        """Where only the owners' slices are new, whole weights must be gathered before they are used again. Hidden, they read as
        NaN until then; where all of them are new, until they are shown."""
        if self.placement.param.split:
            return
        for segment in self.trained if hide else ():
            segment.weights.hide()
        if self.placement.optim.split:
            self.present = not self.absentees

    def show(self) -> None:
        """Weights that were hidden, and are all here."""
        if self.present and not self.placement.param.split:
            for segment in self.trained:
                segment.weights.bind()

    @property
    def behind(self) -> bool:
        """Whether weights do not follow their last update yet."""
        return any(segment.behind for segment in self.trained)

    def catch_up(self) -> bool:
        """Have the weights follow an update that they did not follow at once; whether there was one."""
        caught_up = [segment.catch_up() for segment in self.trained]
        if any(caught_up):
            self.outdate(hide=self.lazy)
        return any(caught_up)

    def lend(self) -> None:
        """Give the parameters copies that stay valid; split weights are absent until they are gathered again."""
        self.make_whole()
        for segment in self.segments:
            segment.lend()
        self.present = not self.placement.param.split or not self.absentees

    def forget_loan(self) -> None:
        """Take back nothing of what was lent."""
        for segment in self.segments:
            segment.forget_loan()

    def spread(self, writer: Seat) -> None:
        """Give every rank the copies that one has written to."""
        for segment in self.segments:
            segment.weights.spread(writer)

    def take_back(self) -> None:
        for segment in self.segments:
            segment.take_back()

    def open_grads(self) -> None:
        for segment in self.trained:
            segment.grads.open()

    def collect(self) -> None:
        for segment in self.trained:
            segment.grads.collect()

    def start_reduce(self) -> None:
        for segment in self.trained:
            segment.grads.start_reduce(self.name)

    def settle(self) -> None:
        for segment in self.trained:
            segment.grads.settle(self.name)

    def reduce(self) -> None:
        self.start_reduce()
        self.settle()

    def is_complete(self, touched: Collection[object] | None) -> bool:
        """Whether this rank has collected a gradient of every parameter, or of every one that its forward has `touched`, where
        that is known."""
        return all(segment.grads.is_complete(touched) for segment in self.trained)

    def owes(self, *, last: bool) -> bool:
        """Whether this rank has gradients that must still be collected, or reduced where that is due."""
        due = self.placement.grad.split or last
        return any(segment.grads.is_made() or (due and segment.grads.unsent) for segment in self.trained)
