"""A nursery: a process that has imported torch once, forks ranks that train and save, and kills some of them at any moment,
or has one kill itself at a given call to the operating system.

It is asked by lines of JSON, one for each trial, and answers with one.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

WORLD = 2
PATIENCE_S = 30.0
READY, BEGINS, ENDS = b"r", b"b", b"e"  # what ranks say


def rank_main(rank: int, ask: dict[str, Any], speaks: int) -> None:
    """Go on from the newest checkpoint, and save after every step, until somebody ends it."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from faults import faults
    from menagerie import MODELS, Noisy
    from training import config_of, digest_of_what_is_trained, engine_of, take_steps

    from naught.checkpoints import RealDisk, Store

    torch.set_num_threads(1)
    folder = Path(ask["folder"])
    store = dist.FileStore(ask["store"], WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=PATIENCE_S))
    torch.manual_seed(0)
    engine = engine_of(Noisy() if ask["noisy"] else MODELS["tied"](), config_of(ask["stage"], more=ask["more"]))
    if Store(RealDisk(), str(folder)).all():
        engine.load_checkpoint(folder)
    os.write(speaks, READY)
    while engine.global_steps < ask["until"]:
        (loss,) = take_steps(engine, 1, first=engine.global_steps)
        digest = digest_of_what_is_trained(engine)
        if rank == 0:
            note(ask, "reached", f"{engine.global_steps} {digest}")
            note(ask, "losses", f"{engine.global_steps} {loss.hex()}")
        os.write(speaks, BEGINS)
        with faults(str(folder), ask["at"] if rank == ask["victim"] else None, "kill") as struck:
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
        os.write(speaks, ENDS)
        if rank == 0:
            note(ask, "saved", str(engine.global_steps))
        note(ask, f"calls{rank}", str(len(struck.calls)))
        if ask["at"] is not None:
            break
    dist.barrier()


def note(ask: dict[str, Any], name: str, line: str) -> None:
    with Path(ask["notes"], name).open("a", encoding="utf-8") as log:
        log.write(f"{line}\n")


def cut_power(mount: str) -> None:
    """Have a file system forget whatever has not reached its disk: EXT4_IOC_SHUTDOWN, without flushing the log."""
    handle = os.open(mount, os.O_RDONLY)
    fcntl.ioctl(handle, 0x8004587D, struct.pack("I", 2))
    os.close(handle)


class Rank:
    """A child, and what it has said."""

    def __init__(self, rank: int, ask: dict[str, Any]) -> None:
        self.heard, speaks = os.pipe()
        self.said = b""
        self.pid = os.fork()
        if self.pid == 0:
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            code = 3
            try:
                rank_main(rank, ask, speaks)
                code = 0
            finally:
                os._exit(code)
        os.close(speaks)

    def listen(self) -> None:
        """Until it says something, or is gone."""
        said = os.read(self.heard, 100)
        self.said += said or b"."

    def catch_up(self) -> None:
        os.set_blocking(self.heard, False)
        with suppress(BlockingIOError):
            self.said += os.read(self.heard, 10_000)

    @property
    def saves(self) -> bool:
        return self.said.endswith(BEGINS)


def trial(ask: dict[str, Any]) -> dict[str, Any]:
    """Fork ranks, wait until they save, kill, and wait until nobody is left."""
    dice = random.Random(ask["seed"])
    ranks = [Rank(rank, ask) for rank in range(WORLD)]
    for rank in ranks:
        rank.listen()
    victims: list[Rank] = []
    if ask["at"] is None and ask["victim"] is not None:
        for rank in ranks:
            while not rank.saves and not rank.said.endswith(b"."):
                rank.listen()
        time.sleep(dice.uniform(0.0, ask["longest_s"]))
        victims = dice.choice([ranks[:1], ranks[1:], ranks])
        if ask["cut"]:
            cut_power(ask["cut"])
            victims = ranks
        for rank in victims:
            rank.catch_up()
            os.kill(rank.pid, signal.SIGKILL)
    codes, waiting = {}, {rank.pid for rank in ranks}
    deadline = time.monotonic() + PATIENCE_S
    while waiting and time.monotonic() < deadline:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            waiting.discard(ended)
            codes[ended] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002 if not ended else 0)
    for child in waiting:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for rank in ranks:
        os.close(rank.heard)
    return {
        "started": sum(READY in rank.said for rank in ranks),
        "hung": len(waiting),
        "saving": any(rank.saves for rank in victims),
        "codes": [codes.get(rank.pid) for rank in ranks],
    }


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from training import start

    torch.set_num_threads(1)
    start(0, "tied").destroy()  # torch imports a lot when it is first used: so that the children need not

    print(json.dumps({"fine": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(trial(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
