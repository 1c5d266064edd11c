"""External files are read only by `halfbyte.reading`, which converts all parser and system exceptions."""

import ast
from collections.abc import Iterable

from tests.helpers.sources import PACKAGE, syntax_nodes

# Modules that read what this process or this package itself wrote, or that only write.
OWN = {
    "data/encode.py": "the documents that prepare.py wrote as JSON",
    "data/encode_answers.py": "the rows that prepare_answers.py wrote as JSON",
    "data/prepare_answers.py": "the rows that it wrote as JSON",
    "data/prepare_tasks.py": "the rows that it wrote as JSON",
    "bitsandbytes/utils.py": "a dict that it packed into a tensor itself",
    "demo/corpus.py": "Python's own sources, and the package's",
    "utils/environment.py": "the package's metadata and the kernel's files",
    "board/app.py": "the package's own script and style",
    "board/chat.py": "the messages of a page, and what its own engine answers",
    "board/folders.py": "lines of run files, of which it leaves out what is damaged",
    "board/guard.py": "the token that it wrote",
    "board/series.py": "lines of run files, of which it leaves out what is damaged",
    "export/shards.py": "writes",
    "export/weights.py": "a copy of a value",
    "utils/files.py": "writes",
    "utils/hardware.py": "the kernel's files",
    "evaluation/lm_eval.py": "options written as JSON to compare them",
    "memory/allocators.py": "the kernel's files",
    "loading/sharded.py": "slices of safetensors whose heads were looked over",
    "cli/queue.py": "the answer of the runner that it started",
    "runs/queue.py": "rows of its own database, and the bytes of a configuration, for their hash",
    "parallel/launch/launcher.py": "what a process of this run has written",
    "mesh/peer_memory.py": "the kernel's files",
    "mesh/ranks.py": "what a process of this run has left",
    "gguf/tokenizer.py": "what the tokenizers library says of its own object",
    "utils/processes.py": "the kernel's files",
    "utils/versions.py": "the metadata of installed packages",
    "rewards/jail.py": "what the run has asked of it",
    "rewards/sandbox.py": "the kernel's files",
    "rewards/process.py": "requests and answers between processes of this run",
}
WRITING = [["'w'"], ["'wb'"], ["'a'"], ["'x'"]]


def strays(nodes: Iterable[ast.AST]) -> list[int]:
    """The lines that read a file or parse JSON themselves."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "open" and [ast.unparse(mode) for mode in node.args[1:2]] in WRITING:
                continue
            if name.endswith((".read_text", ".read_bytes")) or name in ("open", "safe_open", "json.loads", "json.load"):
                found.append(node.lineno)
    return found


def test_only_reading_opens_external_files():
    found = {
        path.relative_to(PACKAGE).as_posix(): lines
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in ("reading", "kernels") and (lines := strays(syntax_nodes(path)))
    }
    assert {name: lines for name, lines in found.items() if name not in OWN} == {}
    assert OWN.keys() - found.keys() == set(), "these read nothing any more: take them off the list"
