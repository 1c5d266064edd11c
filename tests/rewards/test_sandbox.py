"""Hostile programs are contained, end in time, and leave nothing behind."""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from halfbyte.rewards import sandbox
from halfbyte.rewards.sandbox import Limits, run

pytestmark = pytest.mark.skipif(
    sandbox.unsupported_reason() is not None, reason=f"no sandbox here: {sandbox.unsupported_reason()}"
)

LIMITS = Limits(seconds=2)
SLACK = 2.0  # seconds beyond its limit that a program may take to be gone


def contained(program, limits=LIMITS, given=b""):
    """How a program ended; in time, and with none of its processes left."""
    before, began = set(psutil.Process().children(recursive=True)), time.monotonic()
    outcome = run(program, given, limits)
    assert time.monotonic() - began < limits.seconds + SLACK
    after = set(psutil.Process().children(recursive=True)) - before
    assert [process for process in after if process.status() != psutil.STATUS_ZOMBIE] == []
    return outcome


def test_a_program_reads_its_input_and_prints():
    outcome = contained("import sys, json, math\nprint(sum(map(int, sys.stdin)))", given=b"1\n2\n39\n")
    assert (outcome.output, outcome.ended, outcome.code) == (b"42\n", "exit", 0)


def test_a_program_that_ignores_signals_is_killed_in_time():
    program = "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    assert contained(f"{program}    except (OSError, ValueError): pass\ntime.sleep(600)").ended == "time"


def test_a_fork_bomb_is_contained():
    contained("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass")


def test_memory_is_bounded():
    outcome = contained("kept = bytearray(4 << 30)\nprint(len(kept))")
    assert outcome.output == b""
    assert outcome.code != 0


def test_output_is_bounded():
    outcome = contained("import sys\nfor _ in range(1024): sys.stdout.write('x' * (1 << 20))")
    assert outcome.ended == "output"
    assert len(outcome.output) == LIMITS.output_bytes


def test_files_are_bounded():
    program = "n = 0\ntry:\n    for i in range(64):\n"
    program += "        with open(f'/tmp/{i}', 'wb') as f: n += f.write(bytes(8 << 20))\n"
    outcome = contained(f"{program}except OSError: print('stopped', n)", Limits(seconds=5))
    assert outcome.output.startswith(b"stopped")
    assert int(outcome.output.split()[1]) <= LIMITS.temporary_bytes


def test_the_network_is_unreachable():
    program = """
import socket
for address in (("127.0.0.1", {port}), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, timeout=1)
        print("connected", address)
    except OSError as error:
        print("no", error.errno)
"""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = contained(program.format(port=server.getsockname()[1]), Limits(seconds=5))
    assert b"connected" not in outcome.output
    assert outcome.output.count(b"no") == 2


def test_home_and_parent_files_are_hidden(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("tell nobody")
    places = [secret, Path.home(), Path(__file__), "/etc/passwd", f"/proc/{os.getpid()}/environ", "/proc/self", "/sys"]
    program = f"import os\nfor place in {[str(p) for p in places]}: print(os.path.exists(place))"
    if str(Path.home()) == "/root":  # its folder may be there, above the interpreter, with nothing else in it
        places.remove(Path.home())
        program = f"import os\nfor place in {[str(p) for p in places]}: print(os.path.exists(place))"
        assert (
            b".ssh" not in contained("import os\nprint(os.listdir('/root') if os.path.isdir('/root') else '')").output
        )
    assert set(contained(program).output.split()) == {b"False"}


def test_open_files_and_environment_are_hidden(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    program = "import os\nprint(dict(os.environ))\nfor n in range(3, 64):\n    try: os.fstat(n); print('open', n)\n"
    outcome = contained(f"{program}    except OSError: pass")
    assert b"hf_secret" not in outcome.output
    assert b"open" not in outcome.output


def test_the_system_is_read_only(tmp_path):
    program = """
import os, sys
for path in ("/x", "/usr/x", "/bin/x", "/lib/x", "/dev/x", os.path.dirname(os.__file__) + "/x", sys.executable):
    try:
        open(path, "ab").close()
        print("wrote", path)
    except OSError:
        print("no")
"""
    outcome = contained(program)
    assert b"wrote" not in outcome.output
    assert outcome.output.count(b"no") == 7


def test_privileges_cannot_be_regained():
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(os.getuid() == 0, libc.mount(None, b"/", None, 32, None), libc.umount2(b"/tmp", 2), libc.setuid(0))
try: os.mknod("/tmp/mem", 0o666 | 0o020000, os.makedev(1, 1)); print("device")
except OSError: print("no device")
print(libc.unshare(0x10000000) == 0 and libc.mount(None, b"/usr", None, 32 | 4096, None) == 0)
"""
    outcome = contained(program)
    assert outcome.output.split() == [b"False", b"-1", b"-1", b"-1", b"no", b"device", b"False"]


def test_a_daemon_ends_with_its_program():
    name = f"daemon-{uuid.uuid4().hex}"  # other tests' programs may run concurrently
    program = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(0); os.close(1); os.close(2)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "{name}"])
    os._exit(0)
print("gone")
"""
    assert contained(program).output == b"gone\n"
    time.sleep(0.1)
    assert not [p for p in psutil.process_iter(["cmdline"]) if name in (p.info["cmdline"] or [])]


def test_a_program_cannot_kill_other_processes():
    program = "import os, signal\nfor pid in (1, -1, os.getppid(), 0):\n    try: os.kill(pid, signal.SIGKILL)\n"
    contained(f"{program}    except OSError: pass\nprint('alive')")
    assert psutil.Process().is_running()


def test_the_sandbox_ends_with_its_parent():
    """After SIGKILL of the caller, no process of the sandbox remains."""
    script = "from halfbyte.rewards.sandbox import Limits, run\nrun('import time; time.sleep(600)', b'', Limits(600))"
    process = subprocess.Popen([sys.executable, "-c", script])
    end = time.monotonic() + 20
    while not (inside := psutil.Process(process.pid).children(recursive=True)) or len(inside) < 4:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert psutil.wait_procs(inside, timeout=5)[1] == []


# The rest: memory that no process need have resident, and ways to a machine's kernel.

CALL = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    return libc.syscall(number, *map(ctypes.c_ulong, arguments)), ctypes.get_errno()
"""


def machines_calls():
    return sandbox.jail.REFUSED_CALLS[os.uname().machine] | sandbox.jail.REFUSED_EVERYWHERE


def test_memory_files_are_refused():
    program = """
import os
kept = []
for n in range(55):
    kept.append(os.memfd_create("x"))
    os.write(kept[-1], bytes(16 << 20))
print("held", len(kept))
"""
    outcome = contained(program, Limits(seconds=5))
    assert b"held" not in outcome.output
    assert outcome.code != 0


def test_system_v_shared_memory_is_refused():
    program = f"""{CALL}
for n in range(8):
    print(call({machines_calls()["shmget"]}, 0, 128 << 20, 0o1600))
"""
    outcome = contained(program, Limits(seconds=5))
    assert outcome.output.split(b"\n")[:8] == [b"(-1, 1)"] * 8


def test_anonymous_shared_memory_is_refused():
    """Pages of a shared mapping stay when a process drops them from its resident set (madvise MADV_DONTNEED)."""
    program = """
import mmap
kept = []
for n in range(3):
    shared = mmap.mmap(-1, 128 << 20)
    shared[:] = bytes(128 << 20)
    shared.madvise(mmap.MADV_DONTNEED)
    kept.append(shared)
print("held", len(kept))
"""
    outcome = contained(program, Limits(seconds=5))
    assert b"held" not in outcome.output
    assert contained("open('/dev/zero')").code != 0


def test_a_shared_mapping_of_a_file_and_private_memory_remain():
    program = """
import mmap
with open("/tmp/x", "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
    mapped[:2] = b"ok"
private = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
private[:2] = b"ok"
import threading, subprocess, sys
thread = threading.Thread(target=print, args=("thread",))
thread.start(); thread.join()
print(open("/tmp/x", "rb").read(2), private[:2], subprocess.run([sys.executable, "-c", "print(1)"]).returncode)
"""
    outcome = contained(program, Limits(seconds=10))
    assert sorted(outcome.output.split()) == [b"0", b"1", b"b'ok'", b"b'ok'", b"thread"]


@pytest.mark.parametrize("flag", ["0x10000000", "0x00020000", "0x40000000", "0x10020000"])
def test_namespaces_are_refused(flag):
    calls, clone = machines_calls(), sandbox.jail.MACHINES[os.uname().machine][1]
    program = f"{CALL}\nprint(call({calls['unshare']}, {flag}), call({clone}, {flag} | 17, 0, 0, 0, 0))"
    assert contained(program).output.strip() == b"(-1, 1) (-1, 1)"


def test_every_refused_call_is_refused():
    numbers = sorted({*machines_calls().values()} - {machines_calls()["reboot"]})
    program = f"{CALL}\nfor number in {numbers}:\n    print(call(number, 0, 0, 0, 0, 0) == (-1, 1))"
    assert contained(program, Limits(seconds=5)).output.split() == [b"True"] * len(numbers)


def test_clone3_is_not_implemented():
    assert contained(f"{CALL}\nprint(call(435, 0, 0))").output.strip() == b"(-1, 38)"


def test_control_group_bounds_memory(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")
    with sandbox.control_group(LIMITS, own) as group:
        assert group is not None
        assert group.parent == tmp_path
        assert int((group / "memory.max").read_text()) == LIMITS.memory + LIMITS.temporary_bytes
        assert int((group / "pids.max").read_text()) >= LIMITS.processes
        for file in group.iterdir():  # a real one is removed with its files
            file.unlink()
    assert not group.exists()


def test_no_control_group_without_permission(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    with sandbox.control_group(LIMITS, tmp_path / "own") as group:
        assert group is None
    with sandbox.control_group(LIMITS, tmp_path / "nowhere" / "own") as group:
        assert group is None
