"""Runs a script as torchrun does, with ranks forked from one process that has imported what takes each of them seconds.

``python tests/forked_ranks.py RANKS SCRIPT``.
"""

import os
import runpy
import socket
import sys

import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401


def run_rank(rank: int, ranks: int, port: int, script: str) -> None:
    """Run the script as one of the ranks."""
    words = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in words.items()}, MASTER_ADDR="127.0.0.1")
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def main() -> int:
    """Fork the ranks; return 0 where all of them end well."""
    ranks, script = int(sys.argv[1]), sys.argv[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.set_num_threads(1)
    for rank in range(ranks):
        if not os.fork():
            run_rank(rank, ranks, port, script)
            return 0
    return max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(ranks)) and 1


if __name__ == "__main__":
    sys.exit(main())
