"""Stands for nsys as 2022.4 was seen to behave: `nsys.py profile --OPTION... PROGRAM...`.

The program gets a session and a parent of its own, which outlives nsys. SIGTERM is handed on to it and nsys ends at
once, whatever the program still does. At the program's end the report is written, and its exit code, or 128 + its
signal, is nsys's.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


def main() -> int:
    options = [word for word in sys.argv[2:] if word.startswith("--")]
    first = next(i for i, word in enumerate(sys.argv[2:], 2) if not word.startswith("--"))
    parent = ["sh", "-c", 'trap "" TERM; "$@"; exit $?', "sh"]
    program = subprocess.Popen([*parent, *sys.argv[first:]], start_new_session=True)

    def hand_on(number: int, frame: object) -> None:
        os.killpg(program.pid, number)
        sys.exit(0)

    signal.signal(signal.SIGTERM, hand_on)
    code = program.wait()
    (output,) = (word.partition("=")[2] for word in options if word.startswith("--output="))
    Path(f"{output}.nsys-rep").write_text("report")
    return code


if __name__ == "__main__":
    sys.exit(main())
