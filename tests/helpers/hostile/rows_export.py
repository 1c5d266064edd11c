"""merge and export."""

from tests.helpers.hostile.cases import Case, mode
from tests.helpers.hostile.rows_models import QUERY, WEIGHTS, nan

ROWS = [
    Case(
        "67 quantized as it is merged",
        "merge run m --quantize nf4",
        code=0,
        given=("run",),
        after=("m", "m/*", "run/merge-nf4.json", "run/report.html"),
        never=(".m.",),
        seconds=4,
    ),
    Case("73 a model with NaN", "export model --gguf f16 --out x.gguf", says="NaN", files={WEIGHTS: nan(QUERY)}),
    Case(
        "58 merge where nothing may be written",
        "merge run shut/m",
        says="shut",
        given=("run",),
        files={"shut": None, "shut/": mode(0o555)},
    ),
    Case("81 SIGTERM while merging", "merge run m", code=143, given=("run",), seconds=6,
         wishes={"signal": "SIGTERM", "when": ".m.*"}),
    Case("81 SIGHUP while exporting", "export model --gguf f16 --out x.gguf", code=129, given=("run",), seconds=6,
         wishes={"signal": "SIGHUP", "when": ".x.gguf.*"}),
    Case("+ merge over something", "merge run model", says="model", given=("run",)),
    Case("+ an unknown type", "export model --gguf q9_9", says="q9_9", fix="q8_0"),
    Case("+ an unknown format", "merge run m --quantize nf5", says="nf5", given=("run",)),
]  # fmt: skip
