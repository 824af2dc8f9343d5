"""A nursery: a process that has imported torch once, forks ranks that train and save, and kills some of them at any moment.

It is asked by lines of JSON, one for each trial, and answers with one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

WORLD = 2
PATIENCE_S = 30.0


def rank_main(rank: int, ask: dict[str, Any], ready: int) -> None:
    """Go on from the newest checkpoint, and save after every step, until somebody ends it."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from training import digest_in_32_bits, start, take_steps

    from naught.checkpoints import RealDisk, Store

    torch.set_num_threads(1)
    folder = Path(ask["folder"])
    store = dist.FileStore(ask["store"], WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=PATIENCE_S))
    engine = start(ask["stage"], "tied", more=ask["more"])
    if Store(RealDisk(), str(folder)).all():
        engine.load_checkpoint(folder)
    os.write(ready, b"x")
    for _ in range(200):
        take_steps(engine, 1, first=engine.global_steps)
        digest = digest_in_32_bits(engine)
        if rank == 0:
            with (folder.parent / "reached").open("a", encoding="utf-8") as log:
                log.write(f"{engine.global_steps} {digest}\n")
        engine.save_checkpoint(folder)


def trial(ask: dict[str, Any]) -> dict[str, Any]:
    """Fork ranks, wait until they train, kill, and wait until nobody is left."""
    dice = random.Random(ask["seed"])
    heard, ready = os.pipe()
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            os.close(heard)
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            try:
                rank_main(rank, ask, ready)
            finally:
                os._exit(3)
        children.append(child)
    os.close(ready)
    told = sum(len(os.read(heard, 1)) for _ in range(WORLD))
    time.sleep(dice.uniform(0.0, ask["longest_s"]))
    victims = dice.choice([children[:1], children[1:], children])
    for child in victims:
        os.kill(child, signal.SIGKILL)
    deadline, waiting = time.monotonic() + PATIENCE_S, set(children)
    while waiting and time.monotonic() < deadline:
        ended, _ = os.waitpid(-1, os.WNOHANG)
        waiting.discard(ended)
        time.sleep(0.002 if not ended else 0)
    for child in waiting:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(heard)
    return {"started": told, "hung": len(waiting), "victims": len(victims)}


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch  # noqa: F401 - so that the children need not
    import training  # noqa: F401

    print(json.dumps({"fine": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(trial(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
