"""`halfbyte mix`: a format for each layer, from calibration text and a budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config import Origin, resolve
from ..config.yaml import dump_mapping
from ..loading.find import find_model, look_over
from ..runs.inputs import check_datasets
from ..runs.saved import find, saved_config
from ..utils.errors import ConfigError, DataError, ModelError, UsageError
from .imports import import_models

if TYPE_CHECKING:
    from ..loading.mixed_formats import Mixture

TOGETHER = 8  # rows of a forward without gradients
HELD_BACK = 8192  # tokens to compare on, at least: with 2,048 chance took nf4 (+0.022 nats) for a mixture of +0.008


def mix_formats(
    name: str, dataset: str, bits: float, formats: str | None, tokens: int
) -> tuple[Mixture, dict[str, float]]:
    """Measure `formats` (comma-separated names; None: all) in every layer of model `name`, and choose within `bits`.

    Every second row of the text is held back; on these the choice is compared with each format alone that fits.

    Args:
        dataset: calibration text, read as for training.
        bits: mean bits per weight of the quantized layers, scales included.
        tokens: how much of the text is measured on; as much again is held back, at least `HELD_BACK`.

    Returns:
        what is best, and the mean loss of a held-back token of each that was compared: "mixture", and formats by name.

    Raises:
        HalfbyteError: the model, the text or a format cannot be used, or the budget or the text is too small.
    """
    place = find(name)
    if place.adapter or not place.base:
        raise ConfigError(f"{name} is a run or an adapter", "name the 16-bit model that it was trained on")
    look_over(Origin(place.base))
    check_datasets(dataset)
    import_models()
    from ..data.calibration import ROW, batched, packed_rows
    from ..data.collate import make_collator
    from ..loading.load import load_model, load_tokenizer
    from ..loading.mixed_formats import best, measure
    from ..modeling.packing import isolate_run

    candidates = _candidates(formats)
    config = saved_config(place, [f"max_length={ROW}", "packing=true", "load_in_4bit=false"], dataset)
    run = resolve(config)
    files = find_model(run.origin)
    how: dict[str, Any] = {"device": config.device, "attn_implementation": config.attn_implementation}
    model = load_model(files, run.storage, dtype=run.precision.compute, **how)
    tokenizer = load_tokenizer(files.place, chat_template_path=config.chat_template_path)
    collate = make_collator(config, tokenizer)
    rows = packed_rows(config, tokenizer, 2 * max(tokens, HELD_BACK))
    if len(rows) < 2:
        raise DataError(f"{dataset}: there are not two rows of {ROW} tokens, and one is held back", "give more text")
    isolate_run(model, config, collate, rows)
    options = measure(model, candidates, batched(rows[::2][: max(1, tokens // ROW)], collate, model.device))
    return best(model, candidates, options, bits, list(batched(rows[1::2], collate, model.device, TOGETHER)))


def _candidates(formats: str | None) -> dict[str, Any]:
    """The formats by name."""
    from .. import formats as registry

    wanted = sorted(registry.names()) if formats is None else [each.strip() for each in formats.split(",")]
    try:
        return {each: registry.named(each) for each in wanted}
    except ModelError as error:
        raise UsageError(f"--formats {formats}: {error.message}", error.fix) from error


def explain(mixture: Mixture, losses: Mapping[str, float]) -> str:
    """How many layers got each format, what it comes to, and how it compares with each format alone."""
    formats = sorted({option.format for option in mixture.layers.values()})
    lines = []
    for name in formats:
        of_it = [option for option in mixture.layers.values() if option.format == name]
        lines.append(f"{name}: {len(of_it)} layers, {sum(option.nbytes for option in of_it) / 2**20:.1f} MiB")
    lines.append(f"{mixture.bits:.3f} bits per weight")
    compared = ", ".join(f"{name} {losses[name]:.4f}" for name in sorted(losses, key=lambda name: losses[name]))
    lines.append(f"loss on text that was not measured on: {compared}")
    if len(formats) == 1:
        lines.append(f"{formats[0]} in every layer is no worse there than the mixture: taken alone")
    else:
        lines.append("the mixture is better there than each format alone that fits")
    return "\n".join(lines)


def as_yaml(mixture: Mixture) -> str:
    """The mapping that `quantization:` takes, one layer a line."""
    return dump_mapping(mixture.patterns())
