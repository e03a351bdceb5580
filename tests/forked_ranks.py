"""Runs scripts as torchrun does, with ranks forked from one process that has imported what takes each of them seconds.

``python tests/forked_ranks.py`` reads a line of JSON for each script from standard input: the number of ranks, the
script, and the file for what they say. It answers each with a line: 0 where all ranks ended well.
"""

import contextlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback

import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed._composable
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

SECONDS = 300
"""After which a rank waits for ever, and is ended."""


def run_rank(rank: int, ranks: int, port: int, script: str) -> int:
    """Run the script as one of the ranks."""
    words = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in words.items()}, MASTER_ADDR="127.0.0.1")
    sys.argv = [script]
    signal.alarm(SECONDS)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:  # noqa: BLE001 -- whatever it is, the rank has failed
        traceback.print_exc()
        return 1
    return 0


def run(ranks: int, script: str, said: str) -> int:
    """Fork the ranks; return 0 where all of them end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(ranks):
        if not os.fork():
            written = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for stream in (1, 2):
                os.dup2(written, stream)
            code = run_rank(rank, ranks, port, script)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            os._exit(code)
    ended = [os.wait()[1] for _ in range(ranks)]
    return int(any(ended))


def main() -> None:
    """Run what is asked for until nothing is."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        sys.stdout.write(f"{run(*json.loads(line))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
