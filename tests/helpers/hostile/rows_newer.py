"""A third list that nobody had tried: distillation, models that reward, routers, and what became of mixtures since."""

import shutil
from dataclasses import replace

from tests.helpers.hostile.cases import Case, Link, cut, edited, gone, tensors
from tests.helpers.hostile.rows_config import both
from tests.helpers.hostile.rows_data import data
from tests.helpers.hostile.rows_mixed import mixture
from tests.helpers.hostile.rows_preference import lines, pair
from tests.helpers.hostile.rows_rewards import GRPO, PROMPTS

CHECK = "check run.yaml"
LEFT = ("out", "out/*")
PAIRS = lines(pair(), pair(prompt=[{"role": "user", "content": "nine rows"}]))
BOTH_KINDS = {"pairs.jsonl": PAIRS["data.jsonl"], **PROMPTS}
SCORED = "train run.yaml method=reward output_dir=scored dataset=pairs.jsonl"
GKD = "method=gkd max_completion_length=4 per_device_train_batch_size=2"
NAN = float("nan")
LAUNCHED = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def teacher(change=None, file: str = "config.json"):
    """A copy of the model, one of whose files is changed."""

    def make(path) -> None:
        shutil.copytree(path.parent / "model", path)
        if change is not None:
            change(path / file)

    return {"teacher": make}


def learned(name: str, keys: str, says="", **more) -> Case:
    """A distillation case, refused by `check` and by `train` unless `wishes` say otherwise."""
    run = more.pop("run", both(f"{GKD} {keys}"))
    return Case(name, run, says=says, files=more.pop("rows", PROMPTS) | more.pop("files", {}), **more)


def judged(name: str, entry: str, says="", **more) -> Case:
    """By a model of `first`'s, a finished run of method: reward."""
    run = more.pop("run", tuple([*command.split(), *GRPO.split(), f"reward_funcs={entry}"]
                                for command in ("check run.yaml", "train run.yaml")))  # fmt: skip
    return Case(name, run, says=says, files=BOTH_KINDS | more.pop("files", {}), first=SCORED, **more)


def routed(name: str, keys: str, says="", change=None, file="config.json", **more) -> Case:
    files = mixture(change, file) | more.pop("files", {})
    return Case(name, more.pop("run", f"{CHECK} {keys}".strip()), says=says, files=files, **more)


DISTILLED = [
    learned("+ nobody to learn from", "", "teacher_model_name_or_path"),
    learned("+ a teacher that is nowhere", "teacher_model_name_or_path=./nowhere", "nowhere"),
    learned("+ data for a teacher", "teacher_model_name_or_path=data.jsonl", "data.jsonl"),
    learned("+ a teacher of other words", "teacher_model_name_or_path=teacher", "teacher/config.json", files=teacher(
        edited(vocab_size=100))),
    learned("+ a teacher cut short", "teacher_model_name_or_path=teacher", "model.safetensors",
            files=teacher(cut(0.5), "model.safetensors")),
    learned("+ a teacher of NaN", "", says="teacher", files=teacher(tensors(
        lambda held: held["model.norm.weight"].fill_(NAN)), "model.safetensors"),
        run=f"train run.yaml {GKD} teacher_model_name_or_path=teacher", seconds=4),
    learned("+ a teacher without config", "teacher_model_name_or_path=teacher", "config.json", files=teacher(gone)),
    learned("+ past the one divergence", "teacher_model_name_or_path=teacher beta=2", "beta", files=teacher()),
    learned("+ before the other divergence", "teacher_model_name_or_path=teacher beta=-1", "beta", files=teacher()),
    learned("+ more than all answers", "teacher_model_name_or_path=teacher lmbda=2", "lmbda", files=teacher()),
    learned("+ no answers of anybody", "teacher_model_name_or_path=teacher lmbda=0", ("lmbda", "answers"),
            files=teacher()),
    learned("+ an adapter teaches", "", run=f"{CHECK} {GKD} teacher_model_name_or_path=run/adapter", given=("run",),
            code=0),
    learned("+ an adapter teaches whose model went away", "teacher_model_name_or_path=run/adapter",
            ("teacher_model_name_or_path", "base_model_name_or_path", "gone"), given=("run",),
            files={"run/adapter/adapter_config.json": edited(base_model_name_or_path="./gone")}),
    learned("+ a run teaches", "", run=f"train run.yaml {GKD} teacher_model_name_or_path=run", given=("run",),
            code=(0, 1), after=LEFT, seconds=4),
    learned("+ a reward model teaches", "teacher_model_name_or_path=scored/adapter", "scored/adapter", first=SCORED,
            rows=BOTH_KINDS),
    learned("+ packed prompts of a teacher", "teacher_model_name_or_path=teacher packing=true", "packing",
            files=teacher()),
    learned("+ a teacher and rewards", "teacher_model_name_or_path=teacher reward_funcs=repetition", "reward_funcs",
            files=teacher()),
    learned("+ a teacher of groups", "teacher_model_name_or_path=teacher num_generations=4", "num_generations",
            files=teacher()),
    learned("+ a teacher of pairs", "teacher_model_name_or_path=teacher", "data.jsonl", rows=PAIRS, files=teacher()),
    learned("+ a teacher for two devices", "teacher_model_name_or_path=teacher 'parallel={data: 2}'", "parallel",
            files=teacher()),
    learned("+ a cold teacher", "teacher_model_name_or_path=teacher temperature=0", "temperature", files=teacher()),
    learned("+ a teacher of all weights", "", run=f"{CHECK} {GKD} teacher_model_name_or_path=teacher use_peft=false"
            " load_in_4bit=false", code=(0, 1), files=teacher()),
    learned("+ a teacher of few positions", "", "the teacher teacher was made for 4", code=0,
            run=f"{CHECK} {GKD} teacher_model_name_or_path=teacher",
            files=teacher(edited(max_position_embeddings=4))),
    learned("+ a teacher whose tokenizer is cut", "teacher_model_name_or_path=teacher", ("teacher_model", "tokenizer"),
            files=teacher(cut(0.5), "tokenizer.json")),
    learned("+ a teacher in NF4", "", run=f"{CHECK} {GKD} teacher_model_name_or_path=teacher", code=(0, 1),
            files=teacher(edited(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}))),
    learned("+ a teacher by another name", "teacher_model_nam=teacher", "teacher_model_nam", fix="teacher_model",
            files=teacher()),
    Case("+ a teacher of imitation", both("teacher_model_name_or_path=model"), says="teacher_model_name_or_path"),
]  # fmt: skip

JUDGED = [
    judged("+ a judge that is nowhere", "{model: ./nowhere}", "nowhere"),
    judged("+ a judge without a head", "{model: model}", "model"),
    judged("+ a judge that imitates", "{model: run}", "run", given=("run",)),
    judged("+ a judge", "{model: scored}", run=f"{CHECK} {GRPO} 'reward_funcs={{model: scored}}'", code=0),
    judged("+ a judge that judges", "{model: scored}", run=f"train run.yaml {GRPO} 'reward_funcs={{model: scored}}'",
           code=0, after=LEFT, seconds=5),
    judged("+ a judge that is a number", "{model: 3}", "model"),
    judged("+ a judge without a name", '{model: ""}', "model"),
    judged("+ a judge and its adapter", "{model: scored/adapter}",
           run=f"{CHECK} {GRPO} 'reward_funcs={{model: scored/adapter}}'", code=(0, 1)),
    judged("+ a judge with options", "{model: {path: scored, what: 1}}", "what"),
    judged("+ data for a judge", "{model: data.jsonl}", "data.jsonl"),
    judged("+ two judges alike", "", run=f"{CHECK} {GRPO} 'reward_funcs=[{{model: scored}}, {{model: scored}}]'",
           code=(0, 1)),
    judged("+ a judge whose adapter is text", "{model: judge}", ("reward_funcs", "judge/adapter_config.json"),
           files={"judge/adapter_config.json": "what"}),
    judged("+ a judge that is a folder of anything", "{model: .}", "reward_funcs: model: .: . has no config.json"),
    judged("+ rewards behind a link to nothing", "r.py:f", ("reward_funcs", "r.py"), files={"r.py": Link("nowhere")}),
    judged("+ a judge from the network", "{model: https://example.com/m}", "https"),
]  # fmt: skip

ROUTED = [
    routed("+ routers unbalanced", "router_aux_loss_coef=-1", "router_aux_loss_coef"),
    routed("+ routers balanced by nothing", "router_aux_loss_coef=.nan", "router_aux_loss_coef"),
    routed("+ routers balanced for ever", "router_aux_loss_coef=.inf", "router_aux_loss_coef"),
    Case("+ routers of a dense model", both("router_aux_loss_coef=0.01"), says="router_aux_loss_coef"),
    Case("+ routers of pairs", both("method=dpo router_aux_loss_coef=0.01"), says="router_aux_loss_coef", files=PAIRS),
    routed("+ balanced routers", "router_aux_loss_coef=0.01", code=0),
    routed("+ routers balanced above all", "", run="train run.yaml router_aux_loss_coef=1e30", code=(0, 1), after=LEFT,
           seconds=5),
    routed("+ routers balanced in stages", "", "router_aux_loss_coef with parallel: pipeline: 2",
           run="train run.yaml router_aux_loss_coef=0.01 'parallel={pipeline: 2}'"),
    routed("+ formats from an empty file", "quantization=m.yaml", "m.yaml is empty", files={"m.yaml": ""}),
    routed("+ an expert fewer", "", "experts", edited(num_experts=3, num_local_experts=3)),
    routed("+ rounded experts", "qat_scheme=nf4 load_in_4bit=false", "qat_scheme"),
    routed("+ kept types of no GGUF", "quantization=keep", "keep"),
    routed("+ routers trained whole", "modules_to_save=[mlp.gate]", code=(0, 1)),
    routed("+ experts trained whole", "modules_to_save=[mlp.experts]", code=(0, 1)),
    routed("+ routers as stacks", "target_parameters=[gate.weight]", code=(0, 1)),
    routed("+ experts of a pattern too wide", "'target_parameters=[\"(\"]'", code=(0, 1)),
    routed("+ a mixture that is mixed", "", run="mix model data.jsonl --bits 4.5 --tokens 128", code=(0, 1), seconds=8),
    routed("+ a mixture that is merged", "", run="merge mixed m", first="train run.yaml output_dir=mixed max_steps=2",
           code=0, after=("m", "m/*", "mixed/*"), seconds=5),
    routed("+ a mixture merged into 4 bits", "", run="merge mixed m --quantize nf4", code=(0, 1), seconds=5,
           first="train run.yaml output_dir=mixed max_steps=2", after=("m", "m/*", "mixed/*")),
]  # fmt: skip

OTHERS = [
    Case("+ an adapter for nobody's server", "export run --adapter what", code=(1, 2), says="what", given=("run",)),
    Case("+ a model's adapter for a server", "export model --adapter vllm --out x", code=(1, 2), says="model"),
    Case("+ a dense adapter for a server", "export run --adapter vllm --out x", code=(0, 1, 2), given=("run",),
         after=("x", "x/*")),
    Case("+ init for distillation without teacher", "init model data.jsonl --method gkd", code=2, says="--method gkd",
         fix="--teacher", files=PROMPTS),
    Case("+ init with a teacher for imitation", "init model data.jsonl --teacher model", code=2, says="--teacher",
         fix="--method gkd"),
    Case("+ init for rewards and few positions", "init model data.jsonl --method grpo", code=0, seconds=4,
         says="max_completion_length: 128", files=data('{"prompt": "a small model"}\n' * 40)),
    Case("+ a method in capitals", f"{CHECK} method=DPO", says="method", fix="dpo"),
    *(Case(f"+ a launcher's {name} of {value}", CHECK, says=(name, repr(value)), environment={**LAUNCHED, name: value})
      for name, value in (("RANK", "2"), ("WORLD_SIZE", "two"), ("LOCAL_RANK", "-1"), ("MASTER_PORT", "70000"))),
    Case("+ init for programs", "init model data.jsonl", code=(0, 1),
         files=data('{"prompt": "a", "tests": [{"input": "1", "output": "2"}]}\n' * 3)),
    Case("+ init for solutions of nothing", "init model data.jsonl", code=(0, 1),
         files=data('{"prompt": "a", "solution": null}\n' * 3)),
    Case("+ a reference that went on", f"{CHECK} {GRPO} reward_funcs=repetition beta=0.1 adapter_path=run/adapter",
         code=0, given=("run",), files=PROMPTS),
    Case("+ pairs packed and free", f"{CHECK} method=dpo packing=true padding_free=true", code=(0, 1), files=PAIRS),
]  # fmt: skip

TABLE = {"prompts.csv": "prompt\nhello\n", "prompts.json": '[{"prompt": "hello"}]\n'}
MISREAD = [
    Case("+ a percentage as a share of steps", f"{CHECK} warmup_ratio=10", says="warmup_ratio", fix="below 1"),
    *(Case(f"+ prompts in a {name}", f"generate run {name}", says=name, fix="one prompt",
           given=("run",), files=TABLE) for name in TABLE),
    Case("+ held-out data that is trained on", f"{CHECK} eval_dataset=data.jsonl", code=0, says="ready"),
    Case("+ files by a pattern", f"{CHECK} dataset=*.jsonl"),
    Case("+ a colon without a space", [*CHECK.split(), "parallel={tensor:3}"],
         fix="{tensor: 3}"),
    Case("+ data at an address", f"{CHECK} dataset=https://example.com/x.jsonl", says="example.com/x.jsonl"),
    Case("+ a checkpoint behind --resume", "train run.yaml --resume stopped/checkpoint-4", code=2, says="checkpoint-4",
         fix="resume_from_checkpoint=stopped/checkpoint-4"),
    Case("+ an adapter file without a byte", "merge run x", fix="copy",
         given=("run",), files={"run/adapter/adapter_model.safetensors": b""}),
    Case("+ stacks of a dense model", f"{CHECK} target_parameters=[experts.up_proj]", says="no stack"),
]  # fmt: skip

SHOWN = ("reward model teaches", "nobody to learn from", "judge that imitates", "an expert fewer",
         "experts trained whole", "of a dense model", "more than all answers", "whose adapter is text",
         "launcher's RANK", "in stages", "percentage", "in a prompts.csv", "behind --resume",
         "colon without")  # fmt: skip
EVERY = [*DISTILLED, *JUDGED, *ROUTED, *OTHERS, *MISREAD]
ROWS = [case if any(words in case.name for words in SHOWN) else replace(case, slow=True) for case in EVERY]
