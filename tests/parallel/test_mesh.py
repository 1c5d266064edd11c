"""A mesh of one process: collectives are the identity, and only `parallel` reads ranks."""

import re
from pathlib import Path

import pytest
import torch

import halfbyte
from halfbyte.config import Parallel
from halfbyte.mesh.mesh import SINGLE_PROCESS, present_mesh
from halfbyte.utils.errors import ConfigError

PACKAGE = Path(halfbyte.__file__).parent
ASKS = re.compile(r"WORLD_SIZE|LOCAL_RANK|[\"']RANK[\"']|get_rank|get_world_size|process_index|num_processes")


def test_collectives_of_one_process_are_the_identity():
    value = torch.ones(3)
    assert SINGLE_PROCESS.sum(value) is value
    assert SINGLE_PROCESS.max(7) == 7
    assert SINGLE_PROCESS.gather_ints([7, 8]) == [[7, 8]]
    assert SINGLE_PROCESS.local_first(lambda: "made") == "made"
    assert SINGLE_PROCESS.all_equal({"rows": 3})
    assert (SINGLE_PROCESS.rank, SINGLE_PROCESS.size, SINGLE_PROCESS.is_main) == (0, 1, True)


def test_one_process_is_a_mesh_of_one(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with present_mesh(None) as mesh:
        assert mesh == SINGLE_PROCESS
    with (
        pytest.raises(ConfigError, match=r"\{shard: 2\}.*2 processes.*1 were"),
        present_mesh(Parallel(shard=2)),
    ):
        pass


OTHERS = {"config/known_keys.py", "utils/processes.py"}  # names of other tools' keys; before torch is imported


def test_only_mesh_and_parallel_read_rank_and_world_size():
    asking = {
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if ASKS.search(path.read_text(encoding="utf-8"))
        and path.relative_to(PACKAGE).parts[0] not in ("mesh", "parallel")
    }
    assert asking == OTHERS
