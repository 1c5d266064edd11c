"""init, mix, import-config, env."""

from tests.helpers.hostile.cases import Case

AXOLOTL = "base_model: model\ndatasets:\n  - path: data.jsonl\n    type: chat_template\n"
FACTORY = "model_name_or_path: model\ndataset: mine\nstage: sft\nfinetuning_type: lora\ntemplate: default\n"


def axolotl(name: str, more: str, **wishes) -> Case:
    return Case(name, "import-config a.yml", files={"a.yml": AXOLOTL + more}, **wishes)


def factory(name: str, info: str | None, more: str = "", **wishes) -> Case:
    known = {} if info is None else {"dataset_info.json": info, "data/dataset_info.json": info}
    return Case(name, "import-config f.yml", files={"f.yml": FACTORY + "dataset_dir: data\n" + more, **known}, **wishes)


ROWS = [
    factory("63 dataset_info.json that is cut", '{"mine": {"file_name', says="dataset_info.json"),
    factory(
        "63 a rank that is a mapping",
        '{"mine": {"file_name": "data.jsonl"}}',
        "lora_rank: {a: 1}\n",
        says="lora_rank",
        code=(1, 0),
    ),
    axolotl("63 a rank that is a mapping", "lora_r: {a: 1}\n", says="lora_r", code=(1, 0)),
    axolotl(
        "65 an optimizer that is not installed",
        "optimizer: paged_adamw_32bit\n",
        code=0,
        says="paged_adamw_32bit",
        never=(": :",),
    ),
    Case("63 not YAML", "import-config a.yml", says="a.yml", files={"a.yml": "a: [b\nc: }\x07"}),
    Case("71 no dataset there", "init model nope.jsonl", says="nope.jsonl", never=("model_name_or_path",)),
    Case("71 init for what is there", "init model data.jsonl", code=0, says="model_name_or_path: model", seconds=4),
    Case("72 data and model swapped", "init data.jsonl model", code=2, says="data.jsonl", fix="init model data.jsonl"),
    Case("72 an unknown format to mix", "mix model data.jsonl --formats nf4,nf5", code=2, says="nf5"),
    Case("85 env in words", "env", code=0, never=("enabled False", "· reason"), says="torch"),
]
