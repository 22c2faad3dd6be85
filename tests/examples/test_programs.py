"""Programs in the style of public repositories train as with DDP, with few of their lines changed."""

from __future__ import annotations

import functools
import os
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import mdcs
from tests.mdcs.runtime.ranks import Ranks

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = Path(__file__).parents[2] / "examples"
WAS = re.compile(r"^( *)(.*?) *# was: (.*)$", re.M)
NEW = re.compile(r"^( *).*?(:?) +# new\n", re.M)


def before(text: str) -> str:
    """Return the program with DDP."""
    return NEW.sub(lambda new: f"{new[1]}if True:\n" if new[2] else "", WAS.sub(r"\1\3", text))


def changed_lines(text: str) -> int:
    return len(WAS.findall(text)) + len(NEW.findall(text))


def losses_of(program: str) -> list[float]:
    """Run a program on this rank, whose process group is there already."""
    quick = functools.partial(mdcs.parallelize, seconds=0.5, progress=False, timeout_s=100)
    with (
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        patch.object(mdcs, "parallelize", quick),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        variables: dict[str, Any] = runpy.run_path(program)
        if isinstance(variables.get("parallel"), mdcs.Session):
            variables["parallel"].close()
    if "accelerate" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
        sys.modules["accelerate.state"].GradientState._reset_state()
    return variables["losses"]


@contextmanager
def torchrun() -> Iterator[None]:
    """Variables that accelerate finds where torchrun has started a rank; it forgets it again."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "TORCHELASTIC_RUN_ID": "test"}
    with patch.dict(os.environ, given | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}):
        yield


def both(ported: str, was: str) -> tuple[list[float], list[float]]:
    with torchrun():
        return losses_of(ported), losses_of(was)


TRIED = [
    (PROGRAMS / "imagenet.py", 6, 0.0),
    (PROGRAMS / "word_language_model.py", 7, 1e-5),
    (PROGRAMS / "wav2vec2.py", 3, 0.0),
    (PROGRAMS / "vit_ema.py", 9, 0.0),
    (PROGRAMS / "dcgan.py", 4, 1e-4),
    (PROGRAMS / "dino.py", 8, 0.0),
    (PROGRAMS / "nanochat.py", 6, 0.0),
    (PROGRAMS / "finetune.py", 2, 0.0),
    (PROGRAMS / "ddpm.py", 2, 0.0),
    (PROGRAMS / "moco.py", 5, 0.0),
    (EXAMPLES / "accelerate_loop.py", 3, 0.0),
]
"""Programs with the lines changed, and how far losses may be from DDP's: torch's norm of gradients rounds otherwise."""


@pytest.mark.parametrize(
    ("program", "lines", "rounding"),
    [pytest.param(*tried, id=tried[0].stem, marks=[pytest.mark.slow] if i else []) for i, tried in enumerate(TRIED)],
)
def test_a_program_trains_as_it_did_with_ddp(two: Ranks, tmp_path: Path, program: Path, lines: int, rounding: float) -> None:
    text = program.read_text()
    assert changed_lines(text) == lines
    was = tmp_path / program.name
    was.write_text(before(text))
    assert "mdcs." not in was.read_text().split('"""')[2]
    for ours, ddp in two.run(both, str(program), str(was), timeout_s=400):
        assert len(ddp) >= 20 and (ours == ddp if rounding == 0.0 else ours == pytest.approx(ddp, rel=rounding))
