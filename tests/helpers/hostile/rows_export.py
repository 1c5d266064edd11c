"""merge and export."""

from tests.helpers.hostile.cases import Case, Link, mode
from tests.helpers.hostile.rows_models import NORM, QUERY, WEIGHTS, nan

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
    Case("73 a norm of NaN", "export model --gguf f16 --out x.gguf", says="NaN", files={WEIGHTS: nan(NORM)}),
    Case(
        "58 merge where nothing may be written",
        "merge run shut/m",
        says="shut",
        given=("run",),
        files={"shut": None, "shut/": mode(0o555)},
    ),
    Case(
        "58 export where nothing may be written",
        "export model --gguf f16 --out shut/x.gguf",
        says="shut",
        files={"shut": None, "shut/": mode(0o555)},
    ),
    *[
        Case(f"81 {name} while {command.split()[0]}ing", command, code=code, given=("run",), wishes=wishes, seconds=6)
        for name, code in (("SIGTERM", 143), ("SIGHUP", 129))
        for command, aside in (("merge run m", ".m.*"), ("export model --gguf f16 --out x.gguf", ".x.gguf.*"))
        for wishes in [{"signal": name, "when": aside}]
    ],
    Case("60 merge into /proc", "merge run /proc/m", says="/proc/m", given=("run",), never=("no space",)),
    Case(
        "+ merge onto a link to nowhere", "merge run m", says="m exists", given=("run",), files={"m": Link("nowhere")}
    ),
    Case("+ merge over something", "merge run model", says="model", given=("run",)),
    Case("+ an unknown type", "export model --gguf q9_9", says="q9_9", fix="q8_0"),
    Case("+ an unknown format", "merge run m --quantize nf5", says="nf5", given=("run",)),
]
