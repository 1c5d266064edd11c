"""environment() is serialisable, reports unknown facts as null, and is cheap to import."""

import json
import shutil
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import psutil
import pytest
import torch

import halfbyte
from halfbyte.utils import environment as module
from halfbyte.utils import hardware
from halfbyte.utils.environment import environment
from halfbyte.utils.errors import ConfigError
from halfbyte.utils.hardware import best_device, chosen_device, compute_dtype


def test_environment_is_json_of_this_machine():
    report = json.loads(json.dumps(environment()))
    assert report["halfbyte"]["version"] == halfbyte.__version__
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["versions"]["torch"] == metadata.version("torch")
    assert report["cpu"]["memory_bytes"] == psutil.virtual_memory().total
    assert report["cpu"]["threads"] == torch.get_num_threads()
    assert report["cpu"]["processors"] >= 1
    assert report["compute_dtype"]["dtype"] == str(compute_dtype(best_device()).dtype).removeprefix("torch.")
    assert len(report["gpus"]) == torch.cuda.device_count() + torch.xpu.device_count()


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("", torch.bfloat16),
        ("DEFAULT", torch.bfloat16),
        ("avx512_core_amx", torch.bfloat16),
        ("AVX512_CORE_BF16", torch.bfloat16),
        ("AVX512_CORE_VNNI", torch.float32),
        ("AVX2", torch.float32),
    ],
)
def test_compute_dtype_respects_onednn_max_cpu_isa(monkeypatch, limit, expected):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(hardware, "_is_amd", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert compute_dtype(torch.device("cpu")).dtype is expected


def test_compute_dtype_of_intels_avx512_bf16_without_amx(monkeypatch):
    monkeypatch.setattr(hardware, "_is_amd", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert compute_dtype(torch.device("cpu")).dtype is torch.float32


@pytest.mark.parametrize("compiler", ["cc", "no-such-compiler"])
def test_kernels_of_a_cpu_need_a_compiler(monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    kernels = environment("cpu")["kernels"]
    assert kernels["enabled"] == (shutil.which(compiler) is not None)
    assert kernels["enabled"] or compiler in kernels["reason"]


def test_kernels_follow_triton_on_a_gpu(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert module._kernels(gpu) == {"enabled": False, "reason": "triton is not installed; using the PyTorch reference"}
    monkeypatch.setattr(module, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(module, "_version", lambda name: "3.9.0")
    assert module._kernels(gpu) == {"enabled": True, "reason": "triton 3.9.0 drives cuda"}


def test_unknown_facts_are_null(monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr(module, "_cpuinfo", dict)
    report = environment()
    assert report["versions"]["no-such-package"] is None
    assert report["device"] is None
    assert report["gpus"] == report["cpu"]["instruction_sets"] == []
    assert report["kernels"]["reason"] == "torch is not installed"


@pytest.mark.slow
def test_mode_of_bitsandbytes():
    program = """
import json, sys
from importlib import metadata
from halfbyte.utils.environment import environment
modes = [environment()["bitsandbytes"]]
import halfbyte.bitsandbytes as own
own.install()
modes.append(environment()["bitsandbytes"])
own.uninstall()
if modes[0]["real"]:
    own.override()
    modes.append(environment()["bitsandbytes"])
print(json.dumps(modes))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    modes = json.loads(done.stdout)
    real = module._version("bitsandbytes")
    assert [each["mode"] for each in modes] == ["none", "install", "override"][: len(modes)]
    assert {each["real"] for each in modes} == {real}
    assert len(modes) == (3 if real else 2)


def test_failing_and_hanging_commands_are_null(monkeypatch):
    assert module._run("false") is None
    assert module._run("true") is None  # prints nothing
    assert module._run("echo", "x") == "x"

    def hang(*arguments, **options):
        raise subprocess.TimeoutExpired("nvidia-smi", 10)

    monkeypatch.setattr(module.subprocess, "run", hang)
    assert module._run("echo", "x") is None


def test_import_loads_neither_torch_nor_transformers():
    modules = "halfbyte.utils.environment, halfbyte.report.card, halfbyte.report.page"
    code = f"import sys, {modules}; print([m for m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'halfbyte.report.plots'" in loaded
    for heavy in ("'torch'", "'transformers'", "'matplotlib'"):
        assert heavy not in loaded


def test_a_device_by_name():
    assert chosen_device(None) == best_device()
    assert chosen_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="cuda:99"):
        chosen_device("cuda:99")
    with pytest.raises(ConfigError, match="'gpu'"):
        chosen_device("gpu")


@pytest.mark.gpu
def test_cuda_means_the_current_device():
    assert chosen_device("cuda") == torch.device("cuda", torch.cuda.current_device())
