"""What every rank runs first: `python -m launch.rank RUN_DIR MODULE [ARGUMENT …]`.

Sends the rank's output to `rank{r}.log`, opens its status record, runs MODULE as `__main__`, and when that
raises leaves the reason in `rank{r}.error`, where the launcher finds the first of all ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path

from launch import orphans, status

AGENT_PID = "MDCS_AGENT_PID"


def main(folder: Path, module: str, arguments: list[str]) -> int:
    """Run `module` as this rank; returns the exit code."""
    rank = int(os.environ["RANK"])
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(log, stream)
    faulthandler.enable()
    status.open_for(folder, rank)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code in (None, 0):
            return 0
        _leave_reason(folder, rank, f"exited with {error.code}")
        return error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        _leave_reason(folder, rank, f"{type(error).__name__}: {error}")
        return 1
    return 0


def _leave_reason(folder: Path, rank: int, message: str) -> None:
    now, said = time.time(), status.current()
    reason = {"schema": 1, "time": now, "rank": rank, "step": said.step if said else 0, "message": message}
    reason |= {"phase": said.phase if said else "starting"}
    temporary = folder / f"rank{rank}.error.part"
    temporary.write_text(json.dumps({**reason, "traceback": traceback.format_exc()}), encoding="utf-8")
    temporary.replace(folder / f"rank{rank}.error")  # whole or not at all: the launcher polls for it
    if elastic := os.environ.get(
        "TORCHELASTIC_ERROR_FILE"
    ):  # in torch's own format, for its report in agent.log
        extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(now))}
        Path(elastic).write_text(
            json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8"
        )


if __name__ == "__main__":
    orphans.die_with_parent(int(os.environ[AGENT_PID]))
    code = main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # at once: a thread that waits for a failed message must not keep a failed rank alive
