"""What a disk can do: bytes a second past the page cache, by several threads, each reading and writing in turn as an update does.

python benchmarks/disk.py FOLDER
python benchmarks/disk.py FOLDER --gib 8 --threads 1,2,4,8
"""

from __future__ import annotations

import argparse
import mmap
import os
import threading
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--gib", type=float, default=4.0, help="the file's size")
    parser.add_argument("--threads", default="1,2,4,8")
    parser.add_argument("--mib", type=int, default=4, help="of one request")
    options = parser.parse_args()
    for threads in map(int, options.threads.split(",")):
        print(threads, "threads:", mixed_rates(options.folder, int(options.gib * 2**30), threads, options.mib << 20), flush=True)


def mixed_rates(folder: str, nbytes: int, threads: int, each: int) -> dict[str, float]:
    """GB/s of writing a file that was empty, of reading it, and of reading and writing each block in turn."""
    handle = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(handle, 0, nbytes)
        blocks = nbytes // each
        return {
            "write": _rate(handle, blocks, each, threads, reads=False, writes=True),
            "read": _rate(handle, blocks, each, threads, reads=True, writes=False),
            "mixed": _rate(handle, blocks, each, threads, reads=True, writes=True),
        }
    finally:
        os.close(handle)


def _rate(handle: int, blocks: int, each: int, threads: int, *, reads: bool, writes: bool) -> float:
    turns = iter(range(blocks))
    lock = threading.Lock()
    faults: list[BaseException] = []

    def work() -> None:
        room = mmap.mmap(-1, each)
        room.write(os.urandom(each))
        try:
            while True:
                with lock:
                    at = next(turns, None)
                if at is None:
                    return
                for wanted, move in ((reads, os.preadv), (writes, os.pwritev)):
                    if wanted and move(handle, [room], at * each) != each:
                        raise OSError("a call moved less than it was asked")
        except OSError as error:
            faults.append(error)

    crew = [threading.Thread(target=work) for _ in range(threads)]
    began = time.perf_counter()
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    if faults:
        raise faults[0]
    return round(blocks * each * (reads + writes) / (time.perf_counter() - began) / 1e9, 3)


if __name__ == "__main__":
    main()
