"""Runs one program of Python, given on standard input, in a process that it confines first.

This file is also a script, of the standard library alone. A filter of system calls (seccomp) lets
a program compute, read files and use memory, and refuses everything else: sockets, new processes,
writing, signals to others. The input is one line, with the limits and the number of bytes of the
program, the program, and a token. The token stays in the pipe, out of the memory of this process,
until the program has ended without an exception; then it is passed on to the output.
"""

import ctypes
import os
import platform
import struct
import sys

_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050001  # the last one: EPERM
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # instructions of BPF
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in seccomp_data
_SEALED = 63  # descriptor of the pipe that has the token
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
            "restart_syscall": 219, "splice": 275, "clock_gettime": 228, "clock_getres": 229,
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
            "ppoll": 73, "splice": 76, "readlinkat": 78, "newfstatat": 79, "fstat": 80, "exit": 93,
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


def main() -> None:
    """Confine this process, run the program, and report."""
    cpu_seconds, memory, length = map(int, _read_line().split())
    program = _read(length)
    os.dup2(0, _SEALED, inheritable=False)
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)  # as descriptor 0
    import io

    sys.stdout = sys.stderr = io.StringIO()
    sys.stdin = io.StringIO()
    write, splice, leave = os.write, os.splice, os._exit  # which the program may replace
    _limit(cpu_seconds, memory)
    _filter_system_calls()
    try:
        # Not as __main__: the metric of Hugging Face does not run what a program keeps for that.
        exec(compile(program, "program", "exec"), {})
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: it did not pass
        write(1, f"\nfailed: {type(error).__name__}: {str(error)[:200]!r}\n".encode())
    else:
        write(1, b"\npassed ")
        splice(_SEALED, 1, 64)
    leave(0)  # what the program registered for the end of the process does not run


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        line += _read(1)
    return line


def _read(length: int) -> bytes:
    """Read so many bytes of the input, and none of those that follow."""
    data = b""
    while len(data) < length:
        if not (part := os.read(0, length - len(data))):
            raise EOFError("the input ended early")
        data += part
    return data


def _limit(cpu_seconds: int, memory: int) -> None:
    import resource

    for limit, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(limit, (value, value))


def _filter_system_calls() -> None:
    """Let this process make only the system calls above, from now on."""
    architecture, numbers = SYSTEM_CALLS[platform.machine()]
    program = _instructions(architecture, numbers)
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


if __name__ == "__main__":
    main()
