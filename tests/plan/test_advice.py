"""Host memory that all ranks of a host pin: how much a plan counts, and when it is refused."""

import pytest
import torch
import transformers

from halfbyte.config import Parallel, RunConfig
from halfbyte.memory import allocators
from halfbyte.optim import offload, optimizer_row
from halfbyte.plan.advice import check_host
from halfbyte.plan.estimate import GIB, estimate
from halfbyte.plan.policy import pinned_bytes
from halfbyte.utils.errors import ConfigError

CONFIG = transformers.LlamaConfig(
    vocab_size=515, hidden_size=64, intermediate_size=200, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip
FULL = {"use_peft": False, "load_in_4bit": False, "max_grad_norm": 0.0, "optim": "adamw"}


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """Free bytes of the host, which a test may change."""
    free = [100 * GIB]
    monkeypatch.setattr(allocators, "available_bytes", lambda: free[0])
    return free


def run_of(**keys):
    return RunConfig(**{"model_name_or_path": "m", "dataset": "d", "max_length": 128, "device": "cuda"} | keys)


def planned(keys, capacity=GIB, **options):
    return estimate(run_of(**keys), CONFIG, device="cuda", capacity_bytes=capacity, **options)


def state_bytes():
    model = transformers.LlamaForCausalLM(CONFIG)
    return optimizer_row(run_of(**FULL, optim_offload=True)).host_bytes(model, run_of(**FULL))


def test_all_ranks_of_a_host_are_counted():
    check_host({"optim_offload": 25 * GIB}, 4, 100 * GIB)
    check_host({"optim_offload": 30 * GIB}, 3, 100 * GIB)
    check_host({}, 4, 0)
    with pytest.raises(ConfigError, match=r"^optim_offload: .*4 .*30.0 GiB.*120 GiB.*100 GiB"):
        check_host({"optim_offload": 30 * GIB}, 4, 100 * GIB)
    with pytest.raises(ConfigError, match=r"^activation_checkpointing: .*optim 5.0 GiB"):
        check_host({"optim": 5 * GIB, "activation_checkpointing": 6 * GIB}, 1, 10 * GIB)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("layout", "slices"), [
    (Parallel(), 1), (Parallel(data=4), 1), (Parallel(shard=4), 4), (Parallel(data=2, shard=2), 2),
])  # fmt: skip
def test_a_plan_counts_the_state_of_one_rank(layout, slices):
    plan = planned(FULL | {"optim_offload": True}, layout=layout)
    assert plan.host == {"optim_offload": state_bytes() // slices}
    assert plan.host_share == 100 * GIB // layout.size
    assert planned(FULL | {"optim_offload": True}, layout=layout, ranks_per_host=1).host_share == 100 * GIB
    assert planned(FULL | {"optim": "paged_adamw_32bit"}, layout=layout).host.keys() == {"optim"}
    assert planned(FULL, layout=layout).host == {}


def test_a_run_fits_only_if_all_ranks_fit_the_host(free):
    free[0] = 4 * state_bytes()
    keys, layout = FULL | {"optim_offload": True}, Parallel(data=4)
    assert planned(keys, layout=layout).fits
    free[0] -= 1
    plan = planned(keys, layout=layout)
    assert plan.fits_device
    assert not plan.fits
    assert planned(keys, layout=layout, ranks_per_host=2).fits


@pytest.mark.slow
def test_auto_keeps_the_state_on_the_device_if_the_host_has_no_room(free, monkeypatch):
    monkeypatch.setattr(offload, "WINDOW", 2**16)
    keys = FULL | {"optim_in_backward": False, "activation_checkpointing": "checkpoint", "use_kernels": False}
    needed = planned(keys | {"optim_offload": True}, layout=Parallel(data=4)).total
    assert planned(keys, needed, layout=Parallel(data=4)).optimizer_choice["optim_offload"] is True
    free[0] = 4 * state_bytes() - 1
    plan = planned(keys, needed, layout=Parallel(data=4))
    assert plan.optimizer_choice["optim_offload"] == "auto"
    assert not plan.fits_device
    assert plan.fits_host


@pytest.mark.slow
def test_offloaded_activations_are_counted():
    keys = {"optim": "paged_adamw_32bit", "r": 4, "per_device_train_batch_size": 2}
    saved, offloaded = (planned(keys | {"activation_checkpointing": level}).host for level in ("keep", "offload_kept"))
    assert saved.keys() == {"optim"}
    assert offloaded.keys() == {"optim", "activation_checkpointing"}
    assert offloaded["optim"] == saved["optim"]
    half = planned({"activation_checkpointing": "offload_kept", "r": 4, "per_device_train_batch_size": 1}).host
    assert offloaded["activation_checkpointing"] == 2 * half["activation_checkpointing"]


def test_a_run_on_a_cpu_pins_nothing():
    plan = estimate(run_of(**FULL, optim_offload=True), CONFIG, device=torch.device("cpu"), capacity_bytes=GIB)
    assert plan.host == {}
    assert plan.fits_host


@pytest.mark.parametrize(("shard", "pinned"), [(1, 1), (1024, 1024), (1025, 2048)])
def test_pinned_shards_are_powers_of_two(shard, pinned):
    assert pinned_bytes(shard) == pinned
