"""A rank that takes part in one all-reduce per step and ends well."""

import os

import torch
import torch.distributed as dist

from launch import status

dist.init_process_group("gloo")
for step in range(1, 4):
    status.set(step=step, phase="all-reduce")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
print(f"the end of rank {os.environ['RANK']}, {os.environ.get('MDCS_SAYS', '')}")
dist.destroy_process_group()
