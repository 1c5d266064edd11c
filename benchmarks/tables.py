"""Rewrites the generated tables of docs/formats.md and README.md: `python -m benchmarks.tables`.

A table lies between a mark and `<!-- end -->`. The marks:

    <!-- quality: FILE -->       what formats cost, from a result in benchmarks/results
    <!-- families -->            what works with which model family, from `halfbyte.modeling.families`
    <!-- cards -->               which model fits which card, from cards.json (`python -m benchmarks.cards`)
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfbyte.modeling.families import Family

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "docs" / "formats.md", ROOT / "README.md")
NAMES = {"Qwen2_5_VL": "Qwen2.5-VL (text part)", "Qwen3VL": "Qwen3-VL (text part)",
         "Qwen2Moe": "Qwen2-MoE", "Qwen3Moe": "Qwen3-MoE", "Phi3": "Phi-3",
         "Gemma2": "Gemma 2", "Gemma3": "Gemma 3 (with images: the text part)", "Ministral3": "Ministral 3",
         "Olmo2": "OLMo 2", "Olmo3": "OLMo 3", "SeedOss": "Seed-OSS", "Exaone4": "EXAONE 4",
         "Cohere2": "Command R7B and A",
         "Ernie4_5": "ERNIE 4.5", "Glm": "GLM-4 (9B)", "Glm4": "GLM-4-0414", "Glm4Moe": "GLM-4.5 to 4.7",
         "Lfm2": "LFM2", "Glm4v": "GLM-4.1V and 4.6V-Flash", "Glm4vMoe": "GLM-4.5V and 4.6V",
         "GraniteMoe": "Granite-MoE", "Olmoe": "OLMoE", "Phimoe": "Phi-3.5-MoE", "Gemma3n": "Gemma 3n",
         "Gemma4": "Gemma 4", "GraniteMoeHybrid": "Granite 4 (hybrid)", "NemotronH": "Nemotron-H",
         "Ernie4_5_Moe": "ERNIE-4.5-MoE", "MiniMaxM2": "MiniMax-M2", "Qwen3_5": "Qwen3.5", "Qwen3_5Moe": "Qwen3.5-MoE",
         "Qwen3Next": "Qwen3-Next", "GptOss": "gpt-oss",
         "MuseGlimmerText": "Muse Glimmer (text part)"}  # fmt: skip
WAYS = ("fused training", "static decoding", "to GGUF", "from GGUF", "images to mmproj")
SIMPLE = re.compile(r"(<!-- (families|cards) -->\n).*?(<!-- end -->)", re.DOTALL)
BLOCK = re.compile(r"(<!-- quality: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
AFTER_QLORA = "after QLoRA"
COLUMNS = {
    "bits per weight": ("bits_per_weight", ".3f"),
    "weight SQNR, dB": ("sqnr_db", ".2f"),
    "perplexity": ("perplexity", ".3f"),
    AFTER_QLORA: ("perplexity_after_qlora", ".3f"),
}


def quality_table(result: dict[str, Any]) -> str:
    """Markdown: a row per format, and what was run."""
    columns = {name: column for name, column in COLUMNS.items() if result["steps"] or name != AFTER_QLORA}
    lines = ["| stored as | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, row in result["stored_as"].items():
        cells = (_cell(row.get(key), form) for key, form in columns.values())
        lines.append(f"| {_label(name, row)} | {' | '.join(cells)} |")
    rows = f"{result['batch'][0]}×{result['batch'][1]}"
    qlora = f"QLoRA: {result['steps']} steps of {rows} tokens, r = {result['rank']}; " if result["steps"] else ""
    run = (
        f"{result['model']} on {result['text']}: about {result['tokens']:,} held-out tokens in windows of at most "
        f"{result['length']}; {qlora}products in {result['dtype']}; {result['device']}."
    )
    return "\n".join([*lines, "", run]) + "\n"


def _label(name: str, row: dict[str, Any]) -> str:
    label = name if row.get("spec") in (None, name) else f"{name} (`{row['spec']}`)"
    return f"{label}, on {row['device']}" if "device" in row else label


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def family_table() -> str:
    """Markdown: a row for families with the same, a column each of WAYS."""
    from halfbyte.modeling.families import FAMILIES

    alike: dict[tuple[str, ...], list[str]] = {}
    for row in FAMILIES:
        parts = "attention, norms" if row.experts else "attention, norms, MLP"
        fused = parts if row.experts or row.own_layer else "yes"
        found = (
            fused if row.patched else "",
            "yes" if decodes(row) else "",
            "yes" if row.gguf.arch else "",
            "yes" if row.gguf.imported else "",
            "yes" if row.tower else "",
        )
        alike.setdefault(found, []).append(NAMES.get(row.name, row.name))
    lines = [f"| model | {' | '.join(WAYS)} |", "|---" * (1 + len(WAYS)) + "|"]
    lines += [f"| {', '.join(names)} | {' | '.join(found)} |" for found, names in alike.items()]
    return "\n".join([*lines, "| other causal LMs | by their `nn.Linear`s | | | | |"]) + "\n"


def decodes(row: Family) -> bool:
    """Return whether halfbyte's own forward generates with a family's causal LM, instead of transformers'.

    For gpt-oss only if its experts are quantized: in 16 bits they would be copied.
    """
    return row.patched and not row.own_layer and row.qk_norm != "shared"


def card_table(result: dict[str, Any]) -> str:
    """Markdown: a row a model, a column a card: the longest row that a step fits."""
    cards = result["cards"]
    lines = [f"| model | weights, GiB | {' | '.join(cards)} |", "|---" * (2 + len(cards)) + "|"]
    for name, row in result["models"].items():
        cells = (f"{row['longest'][card]:,}" if row["longest"][card] else "" for card in cards)
        lines.append(f"| {name} | {row['weights_gib']:.1f} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", result["note"]]) + "\n"


def updated(document: str, results: Path) -> str:
    """The document's text with its tables as the results say."""

    def table(found: re.Match[str]) -> str:
        begin, file, end = found.groups()
        return begin + quality_table(json.loads((results / file).read_text())) + end

    def simple(found: re.Match[str]) -> str:
        begin, kind, end = found.groups()
        made = family_table() if kind == "families" else card_table(json.loads((results / "cards.json").read_text()))
        return begin + made + end

    return SIMPLE.sub(simple, BLOCK.sub(table, document))


def main() -> None:
    for path in DOCUMENTS:
        path.write_text(updated(path.read_text(encoding="utf-8"), ROOT / "benchmarks" / "results"), encoding="utf-8")


if __name__ == "__main__":
    main()
