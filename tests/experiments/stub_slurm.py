"""An sbatch and a squeue whose jobs end at once, without running: well, with a step of 0.25 s, or badly if named `raise`."""

import json
import os
from pathlib import Path

from analysis.events import SCHEMA

_SBATCH = """#!/bin/bash
here=${0%/*}; number=$(($(ls $here | grep -c script) + 1)); cat >$here/script.$number
for folder in $(grep -o 'folder=[^ ]*' $here/script.$number | cut -d= -f2); do
    if grep -q 'name: raise' $folder/frozen.yaml; then code=1 state=failed; else code=0 state=ok; fi
    cp $here/metrics.jsonl $folder; echo $code >$folder/exit_code
    [ ! -e $folder/status.json ] || sed -i "s/submitted/$state/" $folder/status.json
done
echo $number
"""
_STEP = {"event": "step", "step": 1, "warmup": False, "step_s": 0.25}
_SUMMARY = {"event": "summary", "status": "ok", "step_s": dict.fromkeys(("median", "p10", "p90"), 0.25), "peak_bytes": 1}


def install(folder: Path, monkeypatch) -> None:
    """Put the programs on the path. What sbatch is given goes into files script.1, script.2 and so on in the folder."""
    folder.mkdir()
    for name, text in (("sbatch", _SBATCH), ("squeue", "#!/bin/bash\n"), ("scontrol", "#!/bin/bash\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    events = {"event": "job", "schema": SCHEMA}, _STEP, _SUMMARY
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in events))
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
