from __future__ import annotations

import subprocess
import sys


def test_the_server_process_needs_no_torch() -> None:
    code = (
        "import sys, toolkit.serve.run, toolkit.commands.serve\n"
        "heavy = {'torch', 'transformers', 'datasets', 'xgrammar', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
