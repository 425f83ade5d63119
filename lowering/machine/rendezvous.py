"""Rendezvous of the processes of a run before JAX connects them: who has joined, who is lost.

JAX's service does not say which processes have connected, and needs minutes to notice that one has
ended. So every process first connects to rank 0, at the address that JAX's service will use, and
stays connected while each of them prepares the run, for example compiles, and until JAX has
connected all of them. A rank is lost if its connection ends or is silent; rank 0 tells the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from lowering.errors import LoweringError, PeerLost
from sharding_rules.errors import UserError

_HELLO = "graphtrain-rendezvous-3"  # first word of a connection, with the version of the protocol
_WELCOME, _BEAT, _JOINED, _PREPARED, _LEFT = "welcome", "beat", "joined", "prepared", "left"
_REFUSED, _LOST, _FAILED = "refused", "lost", "failed"  # followed by the reason
_CONNECTING = "the processes connected"  # what a process does when another is lost
_PREPARING = "the programs were looked up, fetched or compiled"
_INTERVAL = 1.0  # seconds between heartbeats
_ANSWER_SECONDS = 5.0  # for the first line of a connection; another service may have the address
_RETRY_SECONDS = 0.2
_SUSPENDED_SECONDS = 4.0  # without a turn of this process's thread: the process was stopped
_VERDICT_SECONDS = 5.0  # for the verdict that explains an error of JAX
_CLOSING_SECONDS = 2.0  # for the other processes to read the last lines
_MAX_LISTED_RANKS = 20  # ranks that a message lists
_MAX_REASON = 2000  # characters of the error of another rank


@dataclass(frozen=True)
class Meeting:
    """Place at which the processes of a run meet, and the limits of time."""

    rank: int  # of this process
    count: int
    address: str  # host:port of rank 0
    bind_address: str | None  # host:port at which rank 0 listens; None for all interfaces
    join_timeout: float  # seconds for all processes to join
    silence: float  # seconds without a heartbeat after which a process is lost
    fewer: frozenset[int] = frozenset()  # smaller numbers of processes that suffice after the limit


@contextlib.contextmanager
def joined(meeting: Meeting, end: Callable[[LoweringError], None]) -> Iterator[Session]:
    """Wait until all processes have joined, and observe them while the context is open.

    After the limit of time, a number of processes in `meeting.fewer` suffices. They are numbered
    anew, in the order of their ranks: `rank` and `count` of the session.

    Args:
        meeting: rank of this process, and where it meets the others.
        end: called on another thread, with the reason, if a rank is lost or fails while the context
            is open.

    Raises:
        PeerLost: a rank is lost or did not join in time; the message names it.
        LoweringError: rank 0 cannot listen, or refused this process.
    """
    session = Session(meeting, _listen(meeting) if meeting.rank == 0 else None, end)
    thread = threading.Thread(target=session.run, name="rendezvous", daemon=True)
    thread.start()
    session.all_joined.result()
    try:
        yield session
    except BaseException as error:
        reason = f"rank {meeting.rank} has ended while {session.doing}; see what it printed"
        if isinstance(error, RuntimeError):
            thread.join(_VERDICT_SECONDS)  # a lost rank may be the cause, and ends this process
            first = str(error).partition("\n")[0]
            reason = f"rank {meeting.rank} could not connect to the others: {first}"
        session.leave(reason)
        thread.join(_VERDICT_SECONDS)
        raise
    session.leave()


def names(ranks: Iterable[int]) -> str:
    """Name ranks in a message: "rank 1", "ranks 0, 2 and 3"."""
    words = [str(rank) for rank in ranks]
    if len(words) == 1:
        return f"rank {words[0]}"
    if len(words) > _MAX_LISTED_RANKS:
        words[_MAX_LISTED_RANKS:] = [f"{len(words) - _MAX_LISTED_RANKS} more"]
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def _listen(meeting: Meeting) -> socket.socket:
    """Listen at the address of JAX's service, which takes it when all have joined."""
    own_port = meeting.address.rpartition(":")[2]
    host, _, port = (meeting.bind_address or f":{own_port}").rpartition(":")
    host = host.strip("[]")
    is_dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, int(port)), family=family, backlog=meeting.count, dualstack_ipv6=is_dual
        )
    except OSError as error:
        raise LoweringError(
            f"rank 0 cannot listen at {meeting.bind_address or meeting.address} for the other "
            f"processes: {os.strerror(error.errno or 0)}; use another port, or end what uses it"
        ) from None


@dataclass(eq=False)
class _Peer:
    """Connection to another process."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    heard_at: float = field(default_factory=time.monotonic)
    has_left: bool = False
    reading: asyncio.Task[None] | None = None

    def send(self, word: str, text: str = "") -> None:
        """Send a line, unless the connection has ended."""
        if not self.writer.is_closing():
            self.writer.write(f"{word} {text}\n".encode())

    async def receive(self) -> tuple[str, str]:
        """Return the first word of the next line and the rest; empty if the connection ended."""
        try:
            line = (await self.reader.readline()).decode(errors="replace")
        except (OSError, ValueError):
            line = ""
        self.heard_at = time.monotonic()
        word, _, text = line.strip().partition(" ")
        return word, text

    async def receive_first(self) -> tuple[str, str]:
        """Return the first line; empty if none comes soon."""
        try:
            return await asyncio.wait_for(self.receive(), _ANSWER_SECONDS)
        except TimeoutError:
            return "", ""

    async def close(self) -> None:
        """End the connection when the other process has read what was sent.

        If it were closed with lines in it that nobody has read, the system would discard those that
        the other process has not read yet.
        """
        with contextlib.suppress(OSError, TimeoutError):
            if self.reading is not None and not self.reading.done():
                self.writer.write_eof()
                await asyncio.wait([self.reading], timeout=_CLOSING_SECONDS)
            self.writer.close()
            await asyncio.wait_for(self.writer.wait_closed(), _CLOSING_SECONDS)


class Session:
    """The part of this process in the rendezvous, on a thread of its own."""

    def __init__(
        self,
        meeting: Meeting,
        listener: socket.socket | None,
        end: Callable[[LoweringError], None],
    ) -> None:
        self.all_joined: Future[None] = Future()  # for the main thread
        self.rank, self.count = meeting.rank, meeting.count  # final once all have joined
        self.doing = _CONNECTING
        self._all_prepared: Future[None] = Future()  # for the main thread
        self._prepared: set[int] = set()  # ranks that rank 0 knows to be prepared
        self._meeting, self._listener, self._end = meeting, listener, end
        self._peers: dict[int, _Peer] = {}  # those that this process observes: all, or rank 0
        self._deadline = time.monotonic() + meeting.join_timeout
        self._verdict: LoweringError | None = None
        self._is_leaving = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    def run(self) -> None:
        """Take part until this process leaves, or the rendezvous fails."""
        try:
            asyncio.run(self._take_part())
        except BaseException as error:
            if not self.all_joined.done():
                self.all_joined.set_exception(error)
            elif isinstance(error, LoweringError):
                self._end(error)
                if not self._all_prepared.done():
                    self._all_prepared.set_exception(error)
            else:
                raise

    def prepare(self, action: Callable[[], None]) -> None:
        """Run an action of any duration on every rank, and wait until it has ended on all of them.

        Raises:
            UserError: the action failed on this rank; the others are told, and end.
        """
        self.doing = _PREPARING
        try:
            action()
        except UserError as error:
            first = str(error).partition("\n")[0][:_MAX_REASON]
            self.leave(f"rank {self._meeting.rank} ended with an error: {first}", _FAILED)
            raise
        self._call(lambda: self._note_prepared(self._meeting.rank))
        self._all_prepared.result()
        self.doing = _CONNECTING

    def _note_prepared(self, rank: int) -> None:
        """Note that a rank is prepared; from rank 0, that all are."""
        own = self._meeting.rank
        self._prepared.add(rank)
        if own and rank:
            self._tell(_PREPARED)  # to rank 0
        elif own:
            self._all_prepared.set_result(None)
        elif len(self._prepared) == self.count:
            self._tell(_PREPARED)
            self._all_prepared.set_result(None)

    def leave(self, reason: str = "", word: str = _LOST) -> None:
        """End the observation: JAX has connected this process, or it failed for a reason."""

        def note() -> None:
            if reason and not self._is_leaving:  # the first reason stands
                self._tell(word, reason)
            self._is_leaving = True
            self._changed.set()

        self._call(note)

    def _call(self, note: Callable[[], None]) -> None:
        """Call a function on the thread of the session, unless it has ended."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(note)

    async def _take_part(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = None
        if self._listener is not None:
            server = await asyncio.start_server(self._admit, sock=self._listener)
        else:
            await self._connect()
        try:
            await self._observe(server)
        except LoweringError as verdict:
            self._tell(_LOST if isinstance(verdict, PeerLost) else _FAILED, str(verdict))
            raise
        finally:
            if server is not None:
                server.close()
            self._tell(_LEFT)
            await asyncio.gather(*(peer.close() for peer in self._peers.values()))

    async def _observe(self, server: asyncio.Server | None) -> None:
        """Exchange heartbeats until this process leaves.

        Raises:
            LoweringError: a rank is lost, or has not joined in time.
        """
        looked_at = time.monotonic()
        while not self._is_leaving:
            now = time.monotonic()
            if now - looked_at > _INTERVAL + _SUSPENDED_SECONDS:  # heartbeats are not read yet
                for peer in self._peers.values():
                    peer.heard_at = now
            looked_at = now
            self._tell(_BEAT)
            self._check(now)
            if server is not None and self._are_enough(now):
                server.close()  # JAX's service takes the address
                server = None
                self._begin()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _INTERVAL)

    def _are_enough(self, now: float) -> bool:
        """Return whether the run can begin with the processes that have joined rank 0."""
        there = len(self._peers) + 1
        is_late = now > self._deadline
        return there == self._meeting.count or (is_late and there in self._meeting.fewer)

    def _begin(self) -> None:
        """Tell the processes that have joined rank 0 that they are all, with their numbers."""
        members = sorted({0, *self._peers})
        for rank, peer in self._peers.items():
            peer.send(_JOINED, f"{members.index(rank)} {len(members)}")
        self._note_joined(0, len(members))

    def _note_joined(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self.all_joined.set_result(None)

    def _check(self, now: float) -> None:
        if self._verdict is not None:
            raise self._verdict
        meeting = self._meeting
        for rank, peer in self._peers.items():
            silent = now - peer.heard_at
            if silent > meeting.silence and not peer.has_left:
                raise PeerLost(
                    f"rank {rank} no longer responds: no heartbeat for {silent:.0f} s while "
                    f"{self.doing} (stopped, or its host is lost)"
                )
        is_missing = meeting.rank == 0 and not self.all_joined.done()
        if is_missing and now > self._deadline and not self._are_enough(now):
            there = {0, *self._peers}
            missing = [rank for rank in range(meeting.count) if rank not in there]
            raise PeerLost(
                f"{names(missing)} did not join within {meeting.join_timeout:.0f} s "
                f"({names(sorted(there))} did){self._advice()}"
            )

    def _advice(self) -> str:
        return (
            "; see what it printed, and check that it is started with the right --rank and can "
            f"reach {self._meeting.address} (run.watchdog.join_timeout)"
        )

    def _tell(self, word: str, text: str = "") -> None:
        for peer in self._peers.values():
            peer.send(word, text)

    async def _connect(self) -> None:
        """Connect to rank 0, which may start later.

        Raises:
            PeerLost: it did not start in time.
            LoweringError: it refused this process.
        """
        meeting = self._meeting
        host, _, port = meeting.address.rpartition(":")
        while time.monotonic() < self._deadline:
            with contextlib.suppress(OSError, TimeoutError):
                opened = asyncio.open_connection(host.strip("[]"), int(port))
                peer = _Peer(*await asyncio.wait_for(opened, _ANSWER_SECONDS))
                peer.send(_HELLO, f"{meeting.rank} {meeting.count}")
                word, text = await peer.receive_first()
                if word == _WELCOME:
                    self._peers[0] = peer
                    peer.reading = asyncio.create_task(self._read(0, peer))
                    return
                await peer.close()
                if word == _REFUSED:
                    raise LoweringError(text)
            await asyncio.sleep(_RETRY_SECONDS)
        raise PeerLost(
            f"rank 0 did not answer rank {meeting.rank} within {meeting.join_timeout:.0f} s"
            f"{self._advice()}"
        )

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a process join that has connected to rank 0."""
        peer = _Peer(reader, writer)
        word, text = await peer.receive_first()
        numbers = text.split()
        if word != _HELLO or len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
            await peer.close()  # not a process of a run
            return
        if self.all_joined.done():  # the run has begun without it
            await peer.close()
            return
        rank, count = map(int, numbers)
        if refusal := self._refusal(rank, count):
            peer.send(_REFUSED, refusal)
            await peer.close()
            return
        self._peers[rank] = peer
        peer.send(_WELCOME)
        peer.reading = asyncio.create_task(self._read(rank, peer))

    def _refusal(self, rank: int, count: int) -> str:
        own_count = self._meeting.count
        if count != own_count:
            return f"rank {rank} expects {count} processes, but rank 0 expects {own_count}"
        if rank in self._peers or not 0 < rank < count:
            return f"another process has joined as rank {rank}; every process needs its own --rank"
        return ""

    async def _read(self, rank: int, peer: _Peer) -> None:
        """Read what another process sends, until its connection ends."""
        word = _WELCOME
        while word:
            self._changed.set()
            word, text = await peer.receive()
            if word == _LEFT:
                peer.has_left = True
            elif word == _JOINED:
                self._note_joined(*map(int, text.split()))
            elif word == _PREPARED:
                self._note_prepared(rank)
            elif word in (_LOST, _FAILED) and self._verdict is None:
                self._verdict = PeerLost(text) if word == _LOST else LoweringError(text)
            elif not word and not peer.has_left and self._verdict is None:
                self._verdict = PeerLost(
                    f"rank {rank} has ended while {self.doing}; see what it printed"
                )
        self._changed.set()
