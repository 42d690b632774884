"""ms-swift's trainer in a process that has loaded its libraries already: `python tests/bench/peer_worker.py`.

It imports, prints "ready", waits for a line with the arguments (a JSON list), and runs `swift sft` with them. While one
setting is timed the next one's process loads its libraries, without touching the GPU. It imports nothing of this
repository.
"""

import importlib
import json
import runpy
import sys

NEEDED = ("torch", "transformers.models.qwen3_vl.modeling_qwen3_vl", "peft", "swift.pipelines", "swift.trainers")
USEFUL = ("liger_kernel.transformers", "flash_attn", "deepspeed")  # one that is not there is missed where it is used


def main() -> None:
    """Import, wait, train."""
    for name in NEEDED:
        importlib.import_module(name)
    for name in USEFUL:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
    print("ready", flush=True)
    line = sys.stdin.readline()
    if line:
        sys.argv = ["sft", *json.loads(line)]
        runpy.run_module("swift.cli.sft", run_name="__main__")


if __name__ == "__main__":
    main()
