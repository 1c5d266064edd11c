"""Keys, values and files of configurations."""

from hostile import Case

BOTH = ("check run.yaml", "train run.yaml")


def both(more: str) -> tuple[str, ...]:
    """The same for `check` and `train`."""
    return tuple(f"{command} {more}" for command in BOTH)


ROWS = [
    Case("4 seed below zero", both("seed=-1"), says="seed", owed="prep"),
    Case("+ good check", "check run.yaml", code=0),
    Case("+ good train", "train run.yaml", code=0, after=("out", "out/*"), owed="term"),  # 80,
]
