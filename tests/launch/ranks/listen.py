"""Ranks that connect, and write where they and their agent listen: `listening{rank}`, an address a line."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

LISTEN = "0A"  # as the kernel says it


def listening(pid: int) -> list[str]:
    """The addresses that a process listens on, as the kernel writes them: hexadecimal, in the machine's order of bytes."""
    links = [file.readlink() for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    inodes = {str(link)[len("socket:[") : -1] for link in links if str(link).startswith("socket:[")}
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]]
    return [line[1].partition(":")[0] for line in lines if line[3] == LISTEN and line[9] in inodes]


dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.new_group()
found = listening(os.getpid()) + listening(os.getppid())
dist.barrier()
(Path(sys.argv[1]) / f"listening{dist.get_rank()}").write_text("\n".join(found))
