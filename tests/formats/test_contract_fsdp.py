"""The format contract under FSDP2: two gloo ranks compute what one process does, adapters through PEFT."""

import socket

import pytest
import torch.multiprocessing
from contract import EXAMPLES
from contract_ranks import RANKS, rank_main


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.dist
def test_two_ranks_equal_one_process():
    """All examples in one pair of processes, since starting them takes most of the time."""
    specs = [example.spec for example in EXAMPLES]
    torch.multiprocessing.start_processes(rank_main, (free_port(), specs), nprocs=RANKS, start_method="spawn")
