"""Keys of the arithmetic of GEMMs with frozen weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from .section import Section

RECIPE_OPTIONS = {
    "fp8-hybrid": ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax"),
    "nvfp4": (
        *("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"),
        *("enable_four_over_six", "four_over_six_metric"),
    ),
}


class RecipeSection(Section):
    """Arithmetic"""

    recipe: Literal["bf16", "fp8-hybrid", "nvfp4"] = Field(
        "bf16",
        description="precision of GEMMs with frozen weights, whatever their storage: bf16 (the compute dtype),"
        " fp8-hybrid (E4M3, gradients in E5M2) or nvfp4",
    )
    margin: Annotated[int, Field(ge=0, le=16)] = Field(
        0, description="fp8-hybrid: headroom of the scales, as a power of two"
    )
    amax_history_len: PositiveInt = Field(
        1024, description="fp8-hybrid: number of optimizer steps whose largest magnitudes are recorded"
    )
    amax_compute_algo: Literal["max", "most_recent"] = Field(
        "max", description="fp8-hybrid: magnitude that sets the scale: the largest of the recorded ones, or the newest"
    )
    reduce_amax: bool = Field(
        True, description="fp8-hybrid: reduce magnitudes over all data- and context-parallel ranks"
    )
    disable_rht: bool = Field(False, description="nvfp4: disable the random Hadamard transform")
    disable_stochastic_rounding: bool = Field(
        False, description="nvfp4: round gradients to nearest instead of stochastically"
    )
    disable_2d_quantization: bool = Field(
        False, description="nvfp4: scale weights per 16 values instead of per 16×16 block"
    )
    enable_four_over_six: bool = Field(
        False, description="nvfp4: scale the largest value of each block to 6 or to 4, whichever has the smaller error"
    )
    four_over_six_metric: Literal["MSE", "L1", "AbsMax"] = Field(
        "MSE", description="nvfp4: error that decides between 6 and 4"
    )
