"""The keys of a recipe: what products with the frozen weights are computed in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PositiveInt

from .yaml import dump_value


class RecipeSection(BaseModel):
    """Arithmetic"""

    recipe: Literal["bf16", "fp8-hybrid", "nvfp4"] = Field(
        "bf16",
        description="what products with frozen weights are computed in, whatever stores those: bf16 (dtype), fp8-hybrid"
        " (E4M3, gradients E5M2), nvfp4 (rounded to it)",
    )
    margin: Annotated[int, Field(ge=0, le=16)] = Field(0, description="fp8-hybrid: powers of two of headroom")
    amax_history_len: PositiveInt = Field(1024, description="fp8-hybrid: optimizer steps whose magnitudes set scales")
    amax_compute_algo: Literal["max", "most_recent"] = Field("max", description="fp8-hybrid: which of those steps")
    reduce_amax: bool = Field(True, description="fp8-hybrid: take magnitudes over all data-parallel ranks")
    disable_rht: bool = Field(False, description="nvfp4: no random Hadamard transform")
    disable_stochastic_rounding: bool = Field(False, description="nvfp4: round gradients to nearest")
    disable_2d_quantization: bool = Field(False, description="nvfp4: weight scales per 16 values, not per 16×16")
    enable_four_over_six: bool = Field(False, description="nvfp4: map each block's largest value to 6 or to 4")
    four_over_six_metric: Literal["MSE", "L1", "AbsMax"] = Field(
        "MSE", description="nvfp4: the error that decides between them"
    )


OPTIONS = {
    "fp8-hybrid": ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax"),
    "nvfp4": (
        *("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"),
        *("enable_four_over_six", "four_over_six_metric"),
    ),
}


def recipe_contradictions(config: Any) -> Iterator[tuple[str, str, str]]:
    """(key, what is wrong, fix), of a `RunConfig`."""
    chosen = dump_value("recipe", config.recipe)
    for recipe, key in ((recipe, key) for recipe, keys in OPTIONS.items() for key in keys):
        value = getattr(config, key)
        if recipe != config.recipe and value != RecipeSection.model_fields[key].default:
            wrong = f"{dump_value(key, value)} has no meaning with {chosen}: it is of {recipe}"
            yield key, wrong, f"remove it, or set recipe: {recipe}"
    if config.four_over_six_metric != "MSE" and not config.enable_four_over_six:
        said = dump_value("four_over_six_metric", config.four_over_six_metric)
        yield "four_over_six_metric", f"{said} decides nothing", "set enable_four_over_six: true, or remove it"
    if config.recipe == "bf16":
        return
    if not config.use_peft:
        yield "recipe", f"{chosen} with use_peft: false: it is for frozen weights, and none is", "set recipe: bf16"
    if not config.use_kernels:
        yield (
            "recipe",
            f"{chosen} with use_kernels: false: only fused forwards know recipes",
            "set recipe: bf16",
        )
