"""Print the number of threads for the quickstart: 2, or 1 beside other work. `make`
calls it.

The quickstart's model is so small that two threads on two idle cores are 1.7 times as
fast as one, while two threads that share a core with other work are 2.5 to 7 times
slower. More threads gain nothing. What is idle is measured for a second, because the
load average still counts the installation that has just ended.
"""

import os
import sys
import time
from pathlib import Path


def idle_ticks():
    """Return the idle and all clock ticks of Linux' cores since the start."""
    with Path("/proc/stat").open() as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)  # idle, and waiting for a disk


def idle_cores(seconds=1.0):
    """Return how many cores nothing else uses now."""
    cores = os.cpu_count() or 1
    try:
        idle, all_ticks = idle_ticks()
        time.sleep(seconds)
        idle_after, all_after = idle_ticks()
        return cores * (idle_after - idle) / (all_after - all_ticks)
    except (OSError, ValueError, IndexError, ZeroDivisionError):  # a Mac
        return cores - os.getloadavg()[0]


def main():
    idle = idle_cores()
    threads = 2 if idle >= 1.5 else 1
    print(
        f"== threads: {threads}; idle cores: {idle:.1f} of {os.cpu_count()} "
        "(OMP_NUM_THREADS sets another number)",
        file=sys.stderr,
    )
    print(threads)


if __name__ == "__main__":
    main()
