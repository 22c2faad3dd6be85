"""Signals only set a flag, and are left alone by who starts ranks; a job is requeued only while SLURM has it running."""

import os
import signal
import subprocess
import sys

import pytest

from launch import preemption

SAYS = """#!/bin/sh
echo "$(basename $0) $*" >> {log}
[ "$(basename $0)" = squeue ] && echo {state}
exit 0
"""


@pytest.mark.parametrize(
    ("state", "array", "why", "asked"),
    [
        ("RUNNING", {}, "", "scontrol requeue 7"),
        ("RUNNING", {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, "", "scontrol requeue 5_3"),
        ("COMPLETING", {}, "job 7 was cancelled or is out of time", "squeue -h -j 7 -o %T"),
    ],
)
def test_a_job_is_requeued_by_its_name_unless_it_is_cancelled(tmp_path, monkeypatch, state, array, why, asked):
    for name in ("squeue", "scontrol"):
        (tmp_path / name).write_text(SAYS.format(log=tmp_path / "log", state=state))
        (tmp_path / name).chmod(0o755)
    for key, value in {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **array}.items():
        monkeypatch.setenv(key, value)
    assert preemption.requeue() == why
    assert (tmp_path / "log").read_text().splitlines()[-1] == asked


def test_without_slurm_it_says_so(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", "/nowhere")
    assert preemption.requeue().startswith("job 7 cannot be requeued: ")


def test_a_signal_is_ignored_by_children_until_they_listen():
    code = """
import os, subprocess, sys
from launch import preemption
preemption.ignore()
listens = "import os, signal; from launch import preemption; [os.kill(os.getpid(), s) for s in preemption.SIGNALS]; "
listens += "before = preemption.asked.is_set(); preemption.listen(); os.kill(os.getpid(), signal.SIGUSR2); "
print(subprocess.run([sys.executable, "-c", listens + "print(before, preemption.asked.is_set())"], capture_output=True).stdout)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(b"False True\n") and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
