"""One rank: MindSpore in a process of its own, which does what its host process says.

Nothing of graphtrain is imported, so that it begins as fast as MindSpore does.
"""

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np


class Rank:
    """Arrays and loaded graphs by the numbers and names that the host gives them."""

    def __init__(self, device: str, is_alone: bool) -> None:
        import mindspore

        self._mindspore: Any = mindspore
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        mindspore.set_device(device)
        self.rank = 0
        if not is_alone:
            import mindspore.communication as communication

            communication.init()
            self.rank = communication.get_rank()
        self._groups: set[str] = set()
        self._arrays: dict[int, Any] = {}
        self._graphs: dict[str, Any] = {}

    def load(
        self, name: str, path: str, groups: list[tuple[str, list[int]]], variables: dict
    ) -> None:
        """A graph from a file, and the groups that it names.

        Args:
            variables: shape and type of each variable, by its name in the graph.
        """
        mindspore = self._mindspore
        for group, ranks in groups:
            if group not in self._groups:
                import mindspore.communication as communication

                communication.create_group(group, ranks)
                self._groups.add(group)
        zeros = {
            variable: mindspore.Tensor(np.zeros(shape, _numpy(dtype))).astype(_type(dtype))
            for variable, (shape, dtype) in variables.items()
        }
        graph = mindspore.load(path)
        self._graphs[name] = mindspore.nn.GraphCell(graph, params_init=zeros)

    def put(self, arrays: list[tuple[int, np.ndarray, str]]) -> None:
        """Arrays of the host, of types that NumPy has, as the types that graphs take."""
        for number, array, dtype in arrays:
            self._arrays[number] = self._mindspore.Tensor(array).astype(_type(dtype))

    def run(
        self,
        name: str,
        inputs: list[int],
        variables: dict[str, int],
        returned: list[int],
        written: dict[str, int],
    ) -> dict[int, np.ndarray]:
        """Compute a graph; the scalars that it returned, such as a loss.

        Args:
            inputs: numbers of its arguments, in order.
            variables: number of the array that each variable takes before.
            returned: numbers for what it returns.
            written: number for each variable as it is afterwards.
        """
        graph = self._graphs[name]
        parameters = graph.parameters_dict() if variables else {}
        for variable, number in variables.items():
            given = self._arrays.pop(number)
            if given is not parameters[variable]:
                # A copy, since a graph may return one array under several names, as zeros.
                copy = self._mindspore.Tensor(self._plain(given)).astype(given.dtype)
                parameters[variable].set_data(copy)
        results = graph(*(self._arrays[number] for number in inputs))
        self._arrays.update(zip(returned, results, strict=True))
        self._arrays.update({number: parameters[v] for v, number in written.items()})
        return {
            number: self._plain(result)
            for number, result in zip(returned, results, strict=True)
            if result.size == 1
        }

    def get(self, number: int) -> np.ndarray:
        """An array, in a type that NumPy has."""
        return self._plain(self._arrays[number])

    def _plain(self, array: Any) -> np.ndarray:
        if array.dtype == self._mindspore.bfloat16:
            array = array.astype(self._mindspore.float32)
        return array.asnumpy()

    def forget(self, numbers: list[int]) -> None:
        for number in numbers:
            self._arrays.pop(number, None)


def _numpy(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype.removesuffix("_")


def _type(dtype: str) -> Any:
    import mindspore

    return getattr(mindspore, dtype)


def _condensed(message: str) -> str:
    """The first lines of a message without the frames that MindSpore puts around its parts."""
    lines = [line.strip(" -") for line in message.splitlines()]
    return " ".join(line for line in lines if line)[:600]


def _end_with(host: int) -> None:
    """Have the kernel end this process when its host dies, in whatever wait it is then.

    It goes by the thread that started this one, which for graphtrain is the first.
    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != host:  # gone before
        os._exit(1)


def main() -> None:
    """Serve the host until it is gone."""
    # Schedulers send what is for a run to all of its processes; a rank is told by its host.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with(int(os.environ["GRAPHTRAIN_RANK_HOST"]))
    device, role = os.environ["GRAPHTRAIN_RANK_DEVICE"], os.environ.get("MS_ROLE")
    if role == "MS_SCHED":  # through which the ranks meet
        Rank(device, is_alone=False)
        return
    with Connection(int(os.environ["GRAPHTRAIN_RANK_PIPE"])) as host:
        try:
            rank = Rank(device, is_alone=role is None)
        except Exception as error:
            host.send((None, f"{type(error).__name__}: {_condensed(str(error))}"))
            os._exit(1)
        host.send((rank.rank, ""))
        while True:
            try:
                word, gone, *arguments = host.recv()
            except EOFError:
                break
            try:
                rank.forget(gone)
                host.send((True, getattr(rank, word)(*arguments)))
            except Exception as error:
                host.send((False, f"{type(error).__name__}: {_condensed(str(error))}"))
    os.killpg(0, signal.SIGKILL)  # MindSpore's own end waits for ranks that may be gone


if __name__ == "__main__":
    main()
