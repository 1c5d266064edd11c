"""Records of a run, without measured times and memory."""

import json

TIMES = ("seconds", "time", "memory", "per_second")


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def timeless(records):
    return [{name: each[name] for name in each if not any(word in name for word in TIMES)} for each in records]


def records_of(folder):
    """The completions of a run, and its records by their kind."""
    found = {"completions": lines(folder / "completions.jsonl")}
    for record in timeless(lines(folder / "metrics.jsonl")):
        found.setdefault(record["kind"], []).append(record)
    return found
