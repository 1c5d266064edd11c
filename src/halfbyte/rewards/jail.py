"""What stands between a program that a model has written and this machine; the first process of a sandbox.

Run as a script of its own by `sandbox`, with nothing but the standard library: its source goes to a fresh interpreter.
It needs no rights. In namespaces of their own (user, mount, process, network, IPC, host name, cgroup) it builds a root
of a few read-only folders and a small /tmp in memory, leaves everything else behind, and starts the program without
capabilities, under limits. It stays the first process there: when it ends, or is killed, the kernel kills whatever is
left, daemons too.
"""

import ctypes
import json
import os
import resource
import sys

# linux/sched.h, linux/mount.h, linux/prctl.h
NEW_NS, NEW_CGROUP, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
READ_ONLY, NO_SUID, NO_DEV, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH, DEATH_SIGNAL, DUMPABLE, NO_NEW_PRIVILEGES, KILL = 2, 1, 4, 38, 9
NOBODY = 65534
REFUSED = 125  # the exit code where no sandbox can be built
ROOT = "/tmp"  # where the new root is built: every machine has it, and it is empty for whoever is inside
DEVICES = ("null", "zero", "urandom")
PROGRAM = "/tmp/program.py"
LIMITS = ("seconds", "memory", "processes", "file_bytes", "files")

libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    """A function of the C library; raises OSError with its name."""
    made = [a.encode() if isinstance(a, str) else ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    if getattr(libc, name)(*made) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def write(path, text):
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def enter(process):
    """Give `process`, which has left for namespaces of its own, its users: nobody, and root where this one is.

    Root is needed there to read what root alone may read (its interpreter); the program is nobody's.
    """
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        users = groups = f"0 0 1\n{NOBODY} {NOBODY} 1"
    else:
        write(f"/proc/{process}/setgroups", "deny")
        users, groups = f"{NOBODY} {user} 1", f"{NOBODY} {group} 1"
    write(f"/proc/{process}/uid_map", users)
    write(f"/proc/{process}/gid_map", groups)


def bind(source, target, flags):
    """`source` at `target`; flags that its file system has already cannot be taken off here, so they stay."""
    call("mount", source, target, None, BIND | RECURSIVE, None)
    there = os.statvfs(source).f_flag & (NO_SUID | NO_DEV | NO_EXEC | READ_ONLY)
    relatime = os.statvfs(source).f_flag & (1024 | 2048 | 4096)  # ST_NOATIME, ST_NODIRATIME, ST_RELATIME
    atime = (relatime & 1024) | (relatime & 2048) | ((1 << 21) if relatime & 4096 else 0)
    call("mount", source, target, None, BIND | REMOUNT | there | atime | flags, None)


def build(folders, temporary_bytes):
    """The new root, and nothing behind it."""
    call("mount", None, "/", None, RECURSIVE | PRIVATE, None)
    call("mount", "root", ROOT, "tmpfs", NO_SUID | NO_DEV, "size=1m,mode=755")
    os.chdir(ROOT)
    for folder in folders:
        target = ROOT + folder
        if os.path.islink(folder):  # /bin -> usr/bin
            os.symlink(os.readlink(folder), target)
            continue
        os.makedirs(target, exist_ok=True)
        bind(folder, target, READ_ONLY | NO_SUID | NO_DEV)
    os.mkdir(ROOT + "/dev")
    for name in DEVICES:
        os.close(os.open(f"{ROOT}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o600))
        bind(f"/dev/{name}", f"{ROOT}/dev/{name}", NO_SUID | NO_EXEC)
    os.mkdir(ROOT + "/tmp")
    call("mount", "tmp", ROOT + "/tmp", "tmpfs", NO_SUID | NO_DEV, f"size={temporary_bytes},nr_inodes=4096,mode=777")
    call("pivot_root", ".", ".")  # the old root is now over the new one
    call("umount2", ".", DETACH)
    os.chdir("/")
    call("mount", None, "/", None, BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEV, None)


def limit(limits):
    """What the program's processes may take, each; `processes` is of all together."""
    for kind, most in (
        (resource.RLIMIT_CPU, limits["seconds"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_NPROC, limits["processes"] + 1),  # and this one
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(kind, (most, most))


def begin(command, limits):
    """Become the program, as nobody: the capabilities that a process has in its own namespaces end with the call."""
    os.setsid()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    limit(limits)
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    os.chdir("/tmp")
    os.execve(command[0], [*command, PROGRAM], {})


def first(asked):
    """The first process inside: sets up, runs the program, and ends with what it ended with."""
    call("prctl", DEATH_SIGNAL, KILL, 0, 0, 0)
    call("prctl", DUMPABLE, 0, 0, 0, 0)  # the program is of the same user, and may not look into this process
    build(asked["folders"], asked["temporary_bytes"])
    os.umask(0o022)
    with open(PROGRAM, "w", encoding="utf-8", errors="replace") as file:
        file.write(asked["program"])
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            begin(asked["command"], asked["limits"])
        finally:
            os._exit(126)
    while True:
        pid, status = os.wait()  # of orphans, too
        if pid == child:
            return status


def inside(asked, leaving, entered):
    """What becomes of the program, from within: an exit code."""
    call("unshare", NEW_USER | NEW_NS | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS | NEW_CGROUP)
    os.write(leaving, b"u")
    if os.read(entered, 1) != b"e":
        return REFUSED
    child = os.fork()
    if child == 0:
        code = REFUSED
        try:
            code = ended(first(asked))
        except BaseException as error:
            print(f"sandbox: {error}", file=sys.stderr)
        os._exit(code)
    return ended(os.waitpid(child, 0)[1])


def ended(status):
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def main():
    call("prctl", DEATH_SIGNAL, KILL, 0, 0, 0)
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        asked = json.load(file)
    left, leaving = os.pipe()
    entered, entering = os.pipe()
    child = os.fork()
    if child == 0:
        code = REFUSED
        try:
            call("prctl", DEATH_SIGNAL, KILL, 0, 0, 0)
            code = inside(asked, leaving, entered)
        except OSError as error:
            print(f"sandbox: {error}", file=sys.stderr)
        os._exit(code)
    os.close(leaving)
    os.close(entered)
    if os.read(left, 1):
        enter(child)
        os.write(entering, b"e")
    sys.exit(ended(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
