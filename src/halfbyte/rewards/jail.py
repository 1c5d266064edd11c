"""Isolation of a program that a model has written: the first process of a sandbox.

`sandbox` passes this file's source to a fresh interpreter, so it uses only the standard library. It needs no
privileges. In its own namespaces (user, mount, process, network, IPC, host name, cgroup) it builds a root of a few
read-only folders and a small /tmp in memory, detaches everything else, and starts the program without capabilities,
under limits and a seccomp filter. It stays the init process of the namespace: when it ends or is killed, the kernel
kills all remaining processes, including daemons.

The filter refuses system calls that hold memory outside of any process' resident set (memfd_create, System V and
anonymous shared memory, message queues, vmsplice, io_uring), that create namespaces or mounts, and that reach other
processes or the kernel (ptrace, bpf, perf, keyrings, modules). The remaining resources are bounded: private memory by
the resident set of all processes, files by the size of /tmp.
"""

import ctypes
import errno
import json
import os
import resource
import struct
import sys

# linux/sched.h, linux/mount.h, linux/prctl.h
NEW_NS = 0x00020000
NEW_CGROUP = 0x02000000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PID = 0x20000000
NEW_NET = 0x40000000
READ_ONLY = 1
NO_SUID = 2
NO_DEV = 4
NO_EXEC = 8
REMOUNT = 32
BIND = 4096
RECURSIVE = 16384
PRIVATE = 1 << 18
DETACH = 2
DEATH_SIGNAL = 1
DUMPABLE = 4
NO_NEW_PRIVILEGES = 38
KILL = 9
NOBODY = 65534
REFUSED = 125  # exit code if no sandbox can be built
ROOT = "/tmp"  # mount point of the new root: exists on every machine
DEVICES = ("null", "urandom")  # not /dev/zero: a shared mapping of it is memory outside of any resident set
PROGRAM = "/tmp/program.py"
LIMITS = ("seconds", "memory", "processes", "file_bytes", "files")

# Refused system calls, by machine: asm/unistd_64.h, asm-generic/unistd.h. From 424 on the numbers are the same.
REFUSED_CALLS = {
    "x86_64": {
        "memfd_create": 319, "shmget": 29, "shmat": 30, "semget": 64, "msgget": 68, "mq_open": 240, "vmsplice": 278,
        "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
        "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kexec_load": 246, "kexec_file_load": 320,
        "init_module": 175, "finit_module": 313, "delete_module": 176, "swapon": 167, "swapoff": 168, "acct": 163,
        "reboot": 169, "quotactl": 179, "name_to_handle_at": 303, "open_by_handle_at": 304, "fanotify_init": 300,
        "personality": 135, "syslog": 103, "iopl": 172, "ioperm": 173, "migrate_pages": 256, "move_pages": 279,
    },
    "aarch64": {
        "memfd_create": 279, "shmget": 194, "shmat": 196, "semget": 190, "msgget": 186, "mq_open": 180, "vmsplice": 75,
        "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
        "add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kexec_load": 104, "kexec_file_load": 294,
        "init_module": 105, "finit_module": 273, "delete_module": 106, "swapon": 224, "swapoff": 225, "acct": 89,
        "reboot": 142, "quotactl": 60, "name_to_handle_at": 264, "open_by_handle_at": 265, "fanotify_init": 262,
        "personality": 92, "syslog": 116, "migrate_pages": 238, "move_pages": 239,
    },
}  # fmt: skip
REFUSED_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442,
    "quotactl_fd": 443, "memfd_secret": 447, "open_tree_attr": 467,
}  # fmt: skip
# The machine's number in linux/audit.h, and the numbers of clone and mmap, which are filtered by their arguments.
MACHINES = {"x86_64": (0xC000003E, 56, 9), "aarch64": (0xC00000B7, 220, 222)}
CLONE3 = 435
NEW_ANY = 0x7E020080  # CLONE_NEW* of clone's flags
SHARED_ANONYMOUS = 0x01 | 0x20  # MAP_SHARED (or MAP_SHARED_VALIDATE) and MAP_ANONYMOUS
# linux/bpf_common.h, linux/seccomp.h
LOAD = 0x20
AND = 0x54
EQUAL = 0x15
AT_LEAST = 0x35
ANY_BIT = 0x45
RETURN = 0x06
KILL_PROCESS = 0x80000000
ERRNO = 0x00050000
ALLOW = 0x7FFF0000
SET_SECCOMP, SECCOMP_FILTER = 22, 2
# offsets in seccomp_data (low 32 bits)
NUMBER = 0
ARCHITECTURE = 4
FIRST_ARGUMENT = 16
FOURTH_ARGUMENT = 40

libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    """Call a function of the C library; raises OSError with its name."""
    c_values = [a.encode() if isinstance(a, str) else ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    if getattr(libc, name)(*c_values) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def write(path, text):
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def enter(process):
    """Map users in the namespaces of `process`: nobody, and root if this process is root.

    Root is needed there to read files that only root may read (its interpreter); the program runs as nobody.
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
    """Bind-mount `source` at `target`; mount flags of its file system cannot be removed here, so they are repeated."""
    call("mount", source, target, None, BIND | RECURSIVE, None)
    mount_flags = os.statvfs(source).f_flag & (NO_SUID | NO_DEV | NO_EXEC | READ_ONLY)
    relatime = os.statvfs(source).f_flag & (1024 | 2048 | 4096)  # ST_NOATIME, ST_NODIRATIME, ST_RELATIME
    atime = (relatime & 1024) | (relatime & 2048) | ((1 << 21) if relatime & 4096 else 0)
    call("mount", source, target, None, BIND | REMOUNT | mount_flags | atime | flags, None)


def build(folders, temporary_bytes):
    """Build the new root and detach the old one."""
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
    call("pivot_root", ".", ".")  # the old root is now mounted over the new one
    call("umount2", ".", DETACH)
    os.chdir("/")
    call("mount", None, "/", None, BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEV, None)


def limit(limits):
    """Set the limits of each process of the program; `processes` counts all of them."""
    for limit_type, bound in (
        (resource.RLIMIT_CPU, limits["seconds"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_NPROC, limits["processes"] + 1),  # plus this process
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(limit_type, (bound, bound))


def filter_of(machine):
    """Return the seccomp filter for a machine as a classic BPF program, 8 bytes per instruction.

    Raises OSError for machines without a table of system calls.
    """
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"no system-call filter is known for {machine}")
    architecture, clone, mmap = MACHINES[machine]
    steps = []

    def add(code, value, then=0, otherwise=0):
        steps.append(struct.pack("HBBI", code, then, otherwise, value))

    def refuse(number=errno.EPERM):
        add(RETURN, ERRNO | number)

    add(LOAD, ARCHITECTURE)
    add(EQUAL, architecture, then=1)
    add(RETURN, KILL_PROCESS)
    add(LOAD, NUMBER)
    if machine == "x86_64":  # the x32 calls have numbers of their own
        add(AT_LEAST, 0x40000000, otherwise=1)
        refuse()
    for number in sorted({*REFUSED_CALLS[machine].values(), *REFUSED_EVERYWHERE.values()}):
        add(EQUAL, number, otherwise=1)
        refuse()
    add(EQUAL, CLONE3, otherwise=1)
    refuse(errno.ENOSYS)  # its flags are in memory, which a filter cannot read; the C library falls back to clone
    add(EQUAL, clone, otherwise=4)
    add(LOAD, FIRST_ARGUMENT)
    add(ANY_BIT, NEW_ANY, otherwise=1)
    refuse()
    add(RETURN, ALLOW)
    add(EQUAL, mmap, otherwise=4)
    add(LOAD, FOURTH_ARGUMENT)
    add(AND, SHARED_ANONYMOUS)
    add(EQUAL, SHARED_ANONYMOUS, otherwise=1)
    refuse()
    add(RETURN, ALLOW)
    return b"".join(steps)


def filter_calls():
    """Install the filter for this process and its children; needs PR_SET_NO_NEW_PRIVS."""
    program = filter_of(os.uname().machine)
    steps = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("HP", len(program) // 8, ctypes.addressof(steps))  # struct sock_fprog
    call("prctl", SET_SECCOMP, SECCOMP_FILTER, ctypes.create_string_buffer(pointer, len(pointer)), 0, 0)


def begin(command, limits):
    """Execute the program as nobody; execve drops the capabilities that a process has in its own namespaces."""
    os.setsid()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    limit(limits)
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    os.chdir("/tmp")
    filter_calls()
    os.execve(command[0], [*command, PROGRAM], {})


def run_init(request):
    """Run as the init process: set up, run the program, and return its wait status."""
    call("prctl", DEATH_SIGNAL, KILL, 0, 0, 0)
    call("prctl", DUMPABLE, 0, 0, 0, 0)  # the program has the same user, and must not inspect this process
    build(request["folders"], request["temporary_bytes"])
    os.umask(0o022)
    with open(PROGRAM, "w", encoding="utf-8", errors="replace") as file:
        file.write(request["program"])
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            begin(request["command"], request["limits"])
        except OSError as error:
            print(f"sandbox: {error}", file=sys.stderr)
        finally:
            os._exit(126)
    while True:
        pid, status = os.wait()  # also reaps orphans
        if pid == child:
            return status


def run_inside(request, leaving, entered):
    """Create the namespaces, run the program in them and return its exit code."""
    call("unshare", NEW_USER | NEW_NS | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS | NEW_CGROUP)
    os.write(leaving, b"u")
    if os.read(entered, 1) != b"e":
        return REFUSED
    child = os.fork()
    if child == 0:
        code = REFUSED
        try:
            code = exit_code(run_init(request))
        except BaseException as error:
            print(f"sandbox: {error}", file=sys.stderr)
        os._exit(code)
    return exit_code(os.waitpid(child, 0)[1])


def exit_code(status):
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def main():
    call("prctl", DEATH_SIGNAL, KILL, 0, 0, 0)
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        request = json.load(file)
    if request["group"]:
        write(request["group"] + "/cgroup.procs", "0")
    left, leaving = os.pipe()
    entered, entering = os.pipe()
    child = os.fork()
    if child == 0:
        code = REFUSED
        try:
            call("prctl", DEATH_SIGNAL, KILL, 0, 0, 0)
            code = run_inside(request, leaving, entered)
        except OSError as error:
            print(f"sandbox: {error}", file=sys.stderr)
        os._exit(code)
    os.close(leaving)
    os.close(entered)
    if os.read(left, 1):
        enter(child)
        os.write(entering, b"e")
    sys.exit(exit_code(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
