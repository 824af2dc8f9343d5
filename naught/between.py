"""Between: what scripts have an engine do between two steps: look into it, save it, give it room, feed it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from naught.answers import Answers
from naught.checkpoints import RealDisk, Store, tag_of
from naught.data import Loader, loader_of
from naught.errors import HalfUpdated, UsageError
from naught.norms import norms_by_name
from naught.parking import Parking
from naught.saves.background import Background
from naught.saves.importing import import_weights
from naught.saves.loading import Wanted, find, load
from naught.saves.saving import Asked, begin, write
from naught.saves.snapshot import bytes_of
from naught.saves.whole import save_weights, whole_state
from naught.torn import half_updated
from naught.watchdog import Watchdog

__all__ = ["Between"]


class Between(Answers):
    """The part of an engine that does not train."""

    parking: Parking
    background: Background
    watchdog: Watchdog

    # --- what is inside ---

    def gathered(
        self, params: Iterable[nn.Parameter] | None = None, *, writer: int | None = None
    ) -> AbstractContextManager[None]:
        """While open, these parameters, or all, can be read and written. All ranks must open it, and write the same,
        unless one rank is the writer: then what that one writes is kept."""
        if self.destroyed:
            return nullcontext()
        self.refuse_away()
        return self._lending(params, writer)

    @contextmanager
    def _lending(self, params: Iterable[nn.Parameter] | None, writer: int | None) -> Iterator[None]:
        self.background.settle()  # when it is opened, which may be later
        self.passes.catch_up()
        with self.passes.lending(params, writer):
            yield

    def grad_norms(self) -> dict[str, float]:
        """The norm of each parameter's gradient, by name, between backward and step. All ranks must ask."""
        self.refuse_away()
        self.stepping.refuse_to_look()
        self.passes.complete_late()
        return norms_by_name(self.schedule.units.values(), self.schedule.group, self.scaling.value)

    def report(self) -> dict[str, Any]:
        """What this rank has sent, holds and spends: bytes by collective, unit and phase, and between its own tiers; seconds that
        it has waited, by collective and phase; bytes now, at the peak, and after each phase of the last step, by category, and
        which of those that are allocated are not training's; seconds by phase, on an accelerator its own."""
        return self.watch.report() | {"steps": self.global_steps, "skipped": self.skipped_steps}

    def compile(self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """Compile the forward of every unit by itself: the weights of one come and go between two graphs."""
        modules = dict(self.module.named_modules())
        blocks = [modules[name] for name in self.schedule.units if name] or [self.module]
        for block in blocks:
            block.compile(backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        return any(module._compiled_call_impl is not None for module in self.module.modules())

    def offload_states(
        self,
        include: Sequence[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states, all or those of some kinds, from the device to host memory until reload_states()."""
        del pin_memory, non_blocking
        self.refuse_away()
        self.before_a_change()
        self.passes.close()
        self.parking.park(include, device)
        self.passes.away = UsageError("the engine's states are away", fix="call engine.reload_states() first")

    def reload_states(self, non_blocking: bool = False) -> None:
        del non_blocking
        if self.parking.fetch():  # else something else may be wrong with them
            self.passes.away = None

    # --- checkpoints ---

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        asynchronous: bool | None = None,
    ) -> bool:
        """Save training between two steps, as `save_dir/global_stepN` unless there is a tag. All ranks must call. It is
        saved whole, or an error is raised on every rank and nothing is there.

        Asynchronously (`naught.async_save` is the default) it is copied, and written while training goes on. An error is then
        raised by the step after which it is known on every rank, by the next save or load, by `wait_for_checkpoint` or by
        `destroy`; a script that ends without any of them ends with status 1.
        """
        self.background.wait()
        store = Store(RealDisk(), str(save_dir))
        asked = Asked(
            tag=tag_of(self.global_steps) if tag is None else str(tag),
            points=save_latest,
            frozen=not exclude_frozen_parameters,
            beside=self.settings.naught.async_save if asynchronous is None else asynchronous,
        )
        with self.watchdog.resting():
            self.passes.catch_up()  # so that who goes on and who loads it goes on alike
            save = begin(self, store, asked, client_state or {})
            if asked.beside:
                self.background.start(save)
            else:
                with ThreadPoolExecutor(2, "naught-writer") as threads:
                    write(save, self.schedule.group, lambda: bytes_of(save.tensors), threads=threads)
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until an asynchronous save is over, if there is one. All ranks must call."""
        self.background.wait()

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Load the newest whole checkpoint of a folder, or that of a tag, of any world size, stage and precision. Returns
        its path and the client's state. If anything is wrong, an error is raised on every rank."""
        if custom_load_fn is not None:
            raise UsageError("custom_load_fn is not available", fix="leave it out")
        self.background.wait()
        wanted = Wanted(load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        everything = wanted.strict and wanted.optimizer and not wanted.module_only
        with self.watchdog.resting():
            contents = find(self.schedule.group, Store(RealDisk(), str(load_dir)), tag)
            with self._mending(everything=everything):
                client_state = load(self, contents, wanted)
        return f"{load_dir}/{contents.saved.tag}", client_state

    @contextmanager
    def _mending(self, *, everything: bool) -> Iterator[None]:
        """A load of everything replaces what a step has left that was not ended, or not well."""
        torn = self.passes.away
        if everything and (torn is None or isinstance(torn, HalfUpdated)):
            midway, failed = self._forget_backward(), self.passes.forget_failures()
            self.passes.away = None
            torn = half_updated() if midway or failed else torn
        try:
            yield
        except BaseException:
            self.passes.away = self.passes.away or torn
            raise

    def _forget_backward(self) -> bool:
        """Nobody takes its step. Whether it has updated units."""
        early, running = self.stepping.early, self.schedule.current
        if early is None:
            return False
        begun = early.begun
        if begun or (running is not None and running.uses.seen_backward):
            self.passes.abort()
            early.forget()
            self._start_over()
        return begun

    def _start_over(self) -> None:
        """Whatever follows begins a step."""
        self.accumulation.start_over()
        self.observer.forget()

    def load_weights(self, path: str | Path, strict: bool = True) -> None:
        """Take over whole weights from a safetensors file, or from a folder as Hugging Face writes them: every rank reads the
        bytes that it keeps, straight into its shards. All ranks must call. The optimizer is left as it is."""
        self.background.wait()
        with self.watchdog.resting():
            import_weights(self, RealDisk(), Path(path), strict=strict)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The module's state dict, whole, as copies in host memory. All ranks must call."""
        return whole_state(self, frozen=not exclude_frozen_parameters)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "model.safetensors", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write whole weights, as modules compute with them, to one safetensors file. All ranks must call."""
        with self.watchdog.resting():
            save_weights(self, RealDisk(), str(save_dir), save_filename, frozen=not exclude_frozen_parameters)
        return True

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, custom_load_fn: None = None) -> None:
        """Load whole weights into the module. All ranks must call, with the same state dict."""
        del custom_load_fn
        with self.gathered():
            self.module.load_state_dict(state_dict, strict=strict)

    # --- data ---

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Loader:
        """Batches of this rank's share of a dataset, of the micro-batch's size unless told otherwise; in their own order
        unless they are for training."""
        return loader_of(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            rank=self.schedule.group.part,
            world=self.dp_world_size,
            collate_fn=collate_fn,
            sampler=data_sampler,
            num_workers=num_local_io_workers or 0,
            shuffle=route == "train",
            pin_memory=pin_memory,
            drop_last=self.settings.dataloader_drop_last,
        )
