"""`halfbyte mix`: a format for each layer, from calibration text and a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config_yaml import dump_mapping
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..models.mixed import Mixture


def mix_formats(name: str, dataset: str, bits: float, formats: str | None, tokens: int) -> Mixture:
    """Measure `formats` (comma-separated names; None: all) in every layer of model `name`, and choose within `bits`.

    Args:
        dataset: calibration text, read as for training.
        bits: mean bits per weight of the quantized layers, scales included.
        tokens: how much of the text is used.

    Raises:
        HalfbyteError: the model, the text or a format cannot be used, or the budget is too small.
    """
    from .. import formats as registry
    from ..data.calibration import ROW, calibration_rows
    from ..data.collate import make_collator
    from ..models.isolation import isolate_run
    from ..models.load import load_model, load_tokenizer
    from ..models.mixed import measure, mix
    from ..saved import find, model_keys, saved_config, tokenizer_keys

    wanted = formats.split(",") if formats else sorted(registry.names())
    candidates = {each.strip(): registry.named(each.strip()) for each in wanted}
    place = find(name)
    if place.adapter or not place.base:
        raise ConfigError(f"{name} is a run or an adapter", "name the 16-bit model that it was trained on")
    config = saved_config(place, [f"max_length={ROW}", "packing=true", "load_in_4bit=false"], dataset)
    model = load_model(name, **model_keys(config))
    tokenizer = load_tokenizer(config.model_name_or_path, **tokenizer_keys(config))
    rows = list(calibration_rows(config, tokenizer, tokens, model.device))
    documents = [{"input_ids": row["input_ids"][0].tolist()} for row in rows]
    isolate_run(model, config, make_collator(config, tokenizer), documents)
    return mix(measure(model, candidates, rows), bits)


def explain(mixture: Mixture) -> str:
    """How many layers got each format, and what it comes to."""
    formats = sorted({option.format for option in mixture.layers.values()})
    lines = []
    for name in formats:
        of_it = [option for option in mixture.layers.values() if option.format == name]
        lines.append(f"{name}: {len(of_it)} layers, {sum(option.nbytes for option in of_it) / 2**20:.1f} MiB")
    return "\n".join([*lines, f"{mixture.bits:.3f} bits per weight, summed relative error {mixture.error:.5f}"])


def as_yaml(mixture: Mixture) -> str:
    """The mapping that `quantization:` takes, one layer a line."""
    return dump_mapping(mixture.patterns())
