"""Write the profile of a cluster that one does not have: calculated as those of docs/predictions.md, for mdcs plan.

    python -m benchmarks.calculated llama.json       # Llama 3 70B on 256 H100
    python -m benchmarks.calculated llama.json --model Llama-3-8B --devices 64 --node-gbit 400
    mdcs plan profile.path=llama.json strategy=fsdp scheduler=dear budget=72GiB

Models and devices are those of benchmarks/published.yaml. Parameters are in 16 bit, with fp32 masters of Adam.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from benchmarks.published_runs import DECODERS, DEVICES, Case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", choices=DECODERS, default="Llama-3-70B")
    parser.add_argument("--device", choices=DEVICES, default="h100-80")
    parser.add_argument("--devices", type=int, default=256, help="of the cluster, eight a node")
    parser.add_argument("--node-gbit", type=float, default=3200, help="rate of a node's network, Gbit/s")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens")
    parser.add_argument("--batch", type=int, default=1, help="sequences per device")
    parser.add_argument("--tflops", type=float, default=429, help="that a device reaches")
    asked = parser.parse_args()
    case = Case(
        asked.model, DEVICES[asked.device], asked.devices, asked.batch, "fsdp", "bf16", sequence=asked.sequence,
        card_gbit=asked.node_gbit / 8,
    )  # fmt: skip
    words = f"{asked.model} on {asked.devices} {asked.device}"
    made = dataclasses.replace(case.profile(asked.tflops * 1e12), about={"calculated": words})
    asked.file.write_text(made.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
