"""Confinement of a process: a filter of system calls (seccomp), and limits.

A confined process computes, uses memory and its open pipes, and may read files if it is allowed to.
Everything else is refused: sockets, new processes, writing, signals to others.
"""

import ctypes
import platform
import struct

_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050001  # the last one: EPERM
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # instructions of BPF
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in seccomp_data
_WRITING = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000 | 0o20000000  # flags of open, and O_TMPFILE

# What a program of the standard library needs to compute and to read files: the number of the
# architecture, and of its system calls. `open` is allowed without flags that write.
SYSTEM_CALLS = {
    "x86_64": (
        0xC000003E,
        {
            "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7,
            "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13,
            "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "readv": 19, "writev": 20,
            "access": 21, "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32,
            "nanosleep": 35, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79,
            "readlink": 89, "gettimeofday": 96, "getrusage": 98, "times": 100, "getuid": 102,
            "getgid": 104, "geteuid": 107, "getegid": 108, "sigaltstack": 131, "gettid": 186,
            "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217,
            "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229,
            "clock_nanosleep": 230, "exit_group": 231, "newfstatat": 262, "readlinkat": 267,
            "faccessat": 269, "ppoll": 271, "set_robust_list": 273, "getrandom": 318,
            "membarrier": 324, "statx": 332, "rseq": 334, "faccessat2": 439,
            "openat": 257, "open": 2,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "getcwd": 17, "dup": 23, "faccessat": 48, "close": 57, "getdents64": 61,
            "lseek": 62, "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67,
            "ppoll": 73, "readlinkat": 78, "newfstatat": 79, "fstat": 80, "exit": 93,
            "exit_group": 94, "futex": 98, "set_robust_list": 99, "nanosleep": 101,
            "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115,
            "sched_getaffinity": 123, "sched_yield": 124, "restart_syscall": 128,
            "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139,
            "times": 153, "uname": 160, "getrusage": 165, "gettimeofday": 169, "getpid": 172,
            "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "gettid": 178,
            "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226,
            "madvise": 233, "getrandom": 278, "membarrier": 283, "statx": 291, "rseq": 293,
            "faccessat2": 439, "openat": 56,
        },
    ),
}  # fmt: skip
_CHECKED = {"openat": (2, _WRITING), "open": (1, _WRITING)}  # argument, and bits that are refused
_OF_FILES = frozenset(
    ("open", "openat", "stat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2",
     "readlink", "readlinkat", "getdents64", "getcwd")
)  # fmt: skip


def confine(cpu_seconds: int, memory: int, *, reads_files: bool) -> None:
    """Confine this process from now on.

    Args:
        cpu_seconds: Seconds of a processor, after which the process is killed.
        memory: Bytes of memory, beyond which none is given.
        reads_files: Whether it may open files to read them.
    """
    import resource

    for limit, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(limit, (value, value))
    _filter_system_calls(reads_files)


def _filter_system_calls(reads_files: bool) -> None:
    """Let this process make only the system calls above, from now on."""
    architecture, numbers = SYSTEM_CALLS[platform.machine()]
    allowed = {
        name: number for name, number in numbers.items() if reads_files or name not in _OF_FILES
    }
    program = _instructions(architecture, allowed)
    code = ctypes.create_string_buffer(b"".join(program))

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    described = Filter(len(program), ctypes.addressof(code))
    library = ctypes.CDLL(None, use_errno=True)
    arguments = (38, 1, 0, 0, 0), (22, 2, ctypes.byref(described), 0, 0)
    for one in arguments:  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        if library.prctl(*one) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses a filter of system calls")


def _instructions(architecture: int, numbers: dict[str, int]) -> list[bytes]:
    """Return the filter as a program of BPF; a jump counts the instructions that it skips."""
    made = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    for name, number in numbers.items():
        if name not in _CHECKED:
            made += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, _ALLOW)]
    for name, (argument, refused) in _CHECKED.items():
        if name in numbers:
            made += [
                _instruction(_EQUAL, numbers[name], 0, 4),
                _instruction(_LOAD, _ARGUMENTS + 8 * argument),
                _instruction(_ANY_BIT, refused, 0, 1),
                _instruction(_RETURN, _REFUSE),
                _instruction(_RETURN, _ALLOW),
            ]
    made.append(_instruction(_RETURN, _REFUSE))
    return made


def _instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", operation, if_true, if_false, value)
