"""Merging at sizes that show: host memory, and a real trained model with real text."""

import subprocess
import sys

import pytest

from tests.helpers.merge_runs import save_base, save_run, tensors

MEASURE = """
import resource, sys
from halfbyte.export.merge import merge
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
warm_up, run, out = sys.argv[1:]
merge(warm_up, out + "-small", verify=False)
before = peak()
merge(run, out, verify=False)
print(peak() - before)
"""


@pytest.mark.slow
def test_host_memory_stays_within_two_shards_and_the_adapter(tmp_path):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 8192}
    base = save_base(tmp_path / "base", shard="64MB", num_attention_heads=8, num_key_value_heads=8, **sizes)
    shards = [file.stat().st_size for file in base.glob("*.safetensors")]
    assert len(shards) > 3
    run = save_run(tmp_path / "run", base)
    adapter = (run / "adapter" / "adapter_model.safetensors").stat().st_size
    warm_up = save_run(tmp_path / "small run", save_base(tmp_path / "small"))
    arguments = [sys.executable, "-c", MEASURE, *map(str, (warm_up, run, tmp_path / "merged"))]
    grown = int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()[-1])
    assert grown <= 2 * max(shards) + adapter
    assert tensors(tmp_path / "merged").keys() == tensors(base).keys()
