"""Run the case that made a result, or a benchmark: `python -m benchmarks CASE|BENCHMARK [OPTION…]`.

A case is named like its file in benchmarks/results, which it rewrites. Options are added to those of the table, such as
`--json other.json`. `python -m benchmarks` prints the table: cases, and the benchmarks and options that they run.
Cases on two GPUs start torchrun.
"""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys

from benchmarks.harness import RESULTS

STEP = "step --model llama-3.1-8b --batch 4 --length 2048"
FORMATS = (
    "--specs nf4,kbit:2:nf,kbit:3:nf,kbit:4:nf,kbit:5:nf,hqq:4:64,hqq:8:64,nvfp4,nvfp4-1d,mxfp4,gptq:128:float16:runs"
)
# Case → module and options. A number in front is the number of GPUs. Files in capitals are the reader's.
CASES = {
    "qlora_8b_h200": "qlora_8b --data GSM8K.jsonl --tokenizer LLAMA3/ --work WORK",
    "step_llama8b_1x8192_h200": "step --model llama-3.1-8b --batch 1 --length 8192 --checkpointing --policy auto "
    "--memory-limit-gib 8 --no-floor --peers unsloth",
    "step_llama8b_2x512_h200": "step --model llama-3.1-8b --batch 2 --length 512 --graph --peers unsloth",
    "step_llama8b_4x2048_h200": f"{STEP} --graph --peers unsloth",
    "step_llama8b_4x2048_auto16_h200": f"{STEP} --checkpointing --policy auto --memory-limit-gib 16 --no-floor",
    "step_llama8b_4x2048_checkpointed_h200": f"{STEP} --checkpointing --policy auto --memory-limit-gib 9.7 --no-floor "
    "--peers unsloth",
    "step_llama8b_4x2048_fp8_h200": f"{STEP} --recipe fp8-hybrid --storage fp8-tensor --graph --no-floor",
    "step_llama8b_4x2048_fp8_nf4_h200": f"{STEP} --recipe fp8-hybrid --graph --no-floor",
    "step_qwen06b_2x2048_h200": "step --model qwen3-0.6b --batch 2 --length 2048 --graph --peers unsloth",
    "step_qwen06b_2x512_h200": "step --model qwen3-0.6b --batch 2 --length 512 --graph --peers unsloth",
    "adapters_llama8b_h200": f"{STEP} --graph --no-floor --adapters lora use_dora=true lora_dropout=0.05 lora_fa=true",
    "experts_h200": "step --model qwen3-30b-a3b --layers 8 --batch 4 --length 2048 --no-floor "
    "--storage nf4 kbit3 int4 nvfp4 fp8:row",
    "published_steps_h200": "step --model qwen3-8b --batch 2 --length 2048 --accumulation 4 --graph --no-floor",
    "packed_llama8b_h200": "step --model llama-3.1-8b --length 16384 --documents 24 --graph",
    "context_llama8b_1x360448_h200": "step --model llama-3.1-8b --batch 1 --length 360448 --policy tiled "
    "--memory-limit-gib 80 --no-floor --steps 0",
    "several_gpus_h200x2": "2 several_gpus data",
    "several_gpus_tensor_h200x2": "2 several_gpus tensor",
    "sharded_h200x2": "2 several_gpus gathers",
    "kernels_h200": "elementwise",
    "dequantize_h200": "weights dequantize --peers bitsandbytes,unsloth",
    "gemv_formats_8_h200": "weights gemv --specs int8,fp8:row,fp8:tile,hqq:4:64,hqq:8:64 "
    "--shapes 4096x14336,8192x28672",
    "gemv_formats_kbit_h200": "weights gemv --specs kbit:2:nf,kbit:3:nf,kbit:4:nf,kbit:5:nf --rows 1,4,16",
    "gemv_formats_words_h200": "weights gemv --specs nvfp4,nvfp4-1d,mxfp4,gptq:128:float16:runs "
    "--rows 1,4,8,16,32,64 --shapes 4096x14336",
    "gemv_as_rtx4090_h200": f"weights gemv {FORMATS} --rows 1,4,8,16,32,64 --shapes 4096x14336 --card rtx4090",
    "gemv_as_t4_h200": f"weights gemv {FORMATS} --rows 1,4,16,32 --shapes 4096x14336 --card t4",
    "gemv_peers_h200": "weights gemv --specs gptq:128:float16:runs,nf4 --rows 1,4,8,16,32,64 --shapes 4096x14336 "
    "--peers tinygemm,bitsandbytes,marlin --marlin LIBRARY",
    "decode_llama8b_h200": "decode --peers",
    "formats_decode_h200": "decode --batches 1,8 --storage nf4 kbit3 gptq:128:float16:runs",
    "caches_llama8b_h200": "decode --caches 32x4096",
    "quality_llama40m": "quality LLAMA-40M VALIDATION.jsonl --tokens 300000",
    "quality_llama40m_cpu": "quality LLAMA-40M VALIDATION.jsonl --tokens 4700 --steps 0 --device cpu",
    "quality_smollm2_135m": "quality SMOLLM2.gguf VALIDATION.jsonl --tokens 3000 --steps 0 --device cpu",
    "quality_stories260k": "quality STORIES260K TRAIN_SLICE.txt",
    "quality_hqq_stories260k": "quality STORIES260K TRAIN_SLICE.txt --device cpu",
    "cards": "cards",
    "bnb_bytes_cpu": "bnb_bytes --device cpu",
    "bnb_bytes_h200": "bnb_bytes --device cuda --values 100000000",
    "rollouts_llama8b_h200": "decode --rollouts 64,128,256,512",
    "image_step_qwen25vl_h200": "image_step step --shape qwen2.5-vl-7b --layers 14",
    "image_step_qwen35_h200": "image_step step --shape qwen3.5-9b --layers 8",
    "image_tower_h200": "image_step tower",
    "image_packing_h200": "image_step packing --layers 14",
    "image_memory_h200": "image_step memory",
    "image_prepare_cpu": "image_step prepare --device cpu --pictures 96",
    "startup": "startup",
    "digits_cpu": "digits LLAMA-40M --work WORK",
    "mmproj_answers_cpu": "mmproj_answers --work WORK",
    "board_cpu": "board --seconds 45 --peers",
}


def words_of(case: str) -> tuple[int, str, list[str]]:
    """Return the GPUs, the module and the options of a case."""
    first, *rest = CASES[case].split()
    gpus, (module, *options) = (int(first), rest) if first.isdigit() else (1, [first, *rest])
    return gpus, module, options


def main() -> None:
    if len(sys.argv) == 1 or sys.argv[1].startswith("-"):
        print(__doc__)
        width = max(map(len, CASES))
        print("\n".join(f"{case:{width}}  {words}" for case, words in CASES.items()))
        return
    case, *more = sys.argv[1:]
    if case not in CASES:
        if not (RESULTS.parent / f"{case}.py").is_file():
            raise SystemExit(f"There is no case or benchmark {case!r}. `python -m benchmarks` lists them.")
        del sys.argv[1]
        runpy.run_module(f"benchmarks.{case}", run_name="__main__", alter_sys=True)
        return
    gpus, module, options = words_of(case)
    options = [*options, "--json", str(RESULTS / f"{case}.json"), *more]
    if gpus == 1:
        return importlib.import_module(f"benchmarks.{module}").main(options)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    sys.exit(subprocess.run([*command, "-m", f"benchmarks.{module}", *options], check=False).returncode)


if __name__ == "__main__":
    main()
