"""The command that qualifies a GPU machine: its table and JSON by figures that are made up, its parts on a CPU."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from experiments import gpu, gpu_loops, gpu_parts
from experiments.gpu import PARTS, Part, Result, Row

ABOUT = {"device": "H200, 139 GiB", "torch": "2.13.0", "cuda": "13.0", "driver": "580", "date": "2026-11-22T18:00:00+00:00"}
QUIET = Console(file=io.StringIO())
SMALL = gpu_loops.Scale(torch.device("cpu"), layers=2, width=64, vocabulary=64, sequence=8, batch=1, world=4, rounds=1, steps=2)


def results() -> list[Result]:
    one = {"engine": "mdcs, dp + wfbp", "step_s": 0.1, "host_s": 0.05, "over_plain": 1.01, "busy": 0.99, "losses": 0.001}
    pools = {"peak_bytes": 100, "reserved_bytes": 150, "pools": [1 << 20, 1 << 21], "retries": 0}
    return [
        Result("world of one", 60.0, [{**one, "engine": "plain loop", "over_plain": 1.0}, one]),
        Result("overlap", 9.0, [{"plan": "dp + wfbp", "ours": 0.70, "profiler": 0.82}]),
        Result("allocator", 9.0, [{"plan": "fsdp + priority", **pools}]),
    ]


def verdicts(found: list[Result]) -> dict[str, bool | None]:
    return {f"{part}: {what}": ok for part, what, _, _, ok in gpu.findings(found)}


def test_without_a_gpu_it_says_so_and_claims_nothing(tmp_path: Path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    command = [sys.executable, "experiments/gpu.py", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=Path(gpu.__file__).parents[1], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, gpu.NO_GPU, "")
    assert not (tmp_path / "out").exists()


def test_one_table_one_json(tmp_path: Path):
    console = Console(width=130, record=True, file=io.StringIO())
    code = gpu.report(results(), ABOUT, tmp_path, console)
    said = console.export_text()
    assert code == 1  # the overlap ratios differ by 0.12
    assert "H200" in said and "1.010 × (100.0 ms)" in said and "0.70 and 0.82" in said and "50.0% (pools of 1, 2 MiB)" in said
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["schema"] == gpu.SCHEMA and document["machine"] == ABOUT
    assert [part["name"] for part in document["parts"]] == [r.name for r in results()]
    assert len(document["findings"]) == len(gpu.findings(results()))


def test_what_is_wanted_and_was_not_found():
    missed = [what for what, ok in verdicts(results()).items() if ok is False]
    assert missed == ["overlap: dp + wfbp: overlap ratio, ours and the profiler's"]
    slow = Result("world of one", 1.0, [{"engine": "mdcs, x", "step_s": 0.1, "host_s": 0.1, "over_plain": 1.03, "busy": 0.8,
                                            "losses": 0.1}])  # fmt: skip
    assert not any(ok for ok in verdicts([slow]).values())


def test_a_part_that_fails_does_not_end_the_others():
    def run(part: Part, folder: Path) -> list[Row]:
        if part.name == "overlap":
            raise RuntimeError("CUDA error: out of memory")
        return [{"folder": str(folder)}]

    found = gpu.run_all(PARTS, Path("out"), run, QUIET)
    assert {r.name: r.reason for r in found if r.reason} == {"overlap": "CUDA error: out of memory"}
    assert found[0].rows == [{"folder": "out/world-of-one"}] and found[-1].rows
    assert sum(part.seconds for part in PARTS) < 600


def test_a_process_that_dies_says_why(tmp_path: Path):
    if torch.cuda.is_available():
        pytest.skip("it would run")
    with pytest.raises(RuntimeError, match="nothing was run, and nothing is claimed: see .*output.txt"):
        gpu.in_a_process(PARTS[1], tmp_path)


def test_overlap_in_a_trace():
    """Two seconds of NCCL, one of them beside a kernel; copies are computation, what the host does is neither."""
    event = {"ph": "X", "cat": "kernel"}
    trace = {"traceEvents": [
        {**event, "name": "ncclDevKernel_AllGather", "ts": 0, "dur": 2e6},
        {**event, "name": "gemm", "ts": 1e6, "dur": 0.5e6},
        {**event, "name": "Memcpy", "cat": "gpu_memcpy", "ts": 1.5e6, "dur": 1.5e6},
        {**event, "name": "aten::mm", "cat": "cpu_op", "ts": 0, "dur": 9e6},
        {**event, "name": "gemm", "ts": 4e6, "dur": 1e6},
    ]}  # fmt: skip
    kernels = gpu_parts.kernels_of(trace)
    assert gpu_parts.hidden_share(kernels) == pytest.approx(0.5)
    assert gpu_parts.busy(kernels) == pytest.approx(0.8)
    assert gpu_parts.hidden_share([]) == gpu_parts.busy([]) == 0.0


@pytest.mark.slow
def test_the_parts_run_on_a_small_scale(tmp_path: Path):
    """Their figures mean nothing on a CPU; that they have all that the table asks for does."""
    found = [
        Result("overlap", 0.0, gpu_parts.overlap(SMALL, tmp_path)),
        Result("allocator", 0.0, gpu_parts.allocator(SMALL, tmp_path)),
        Result("checkpointing", 0.0, gpu_parts.checkpointing(SMALL, tmp_path)),
        Result("fp16", 0.0, gpu_parts.fp16(SMALL, tmp_path)),
        Result("world of one", 0.0, gpu_parts.world_of_one(SMALL, tmp_path)),
    ]
    assert {part for part, *_ in gpu.findings(found)} == {r.name for r in found}
    assert [row["engine"] for row in found[-1].rows] == ["plain loop", "DDP", "mdcs, dp + wfbp", "mdcs, fsdp + priority"]
    assert len(found[0].rows) == 2
