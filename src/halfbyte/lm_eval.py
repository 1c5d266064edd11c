"""The model "halfbyte" of EleutherAI's lm-evaluation-harness, by its documented path.

    python -m halfbyte.lm_eval run --model halfbyte --model_args pretrained=out --tasks hellaswag

runs the harness's command `lm_eval` with this model registered (version 0.4.13 finds no models of other packages). In
Python:

    import halfbyte.lm_eval, lm_eval
    lm_eval.simple_evaluate("halfbyte", model_args={"pretrained": "out"}, tasks=["hellaswag"])
"""

from .evaluation.lm_eval import HalfbyteLM

__all__ = ["HalfbyteLM"]

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
