"""One rank: a process with MindSpore that executes the commands of its host process.

It imports nothing of graphtrain, so that it starts as fast as MindSpore does.
"""

import ctypes
import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np


class Rank:
    """Arrays and loaded graphs of a rank, by the ids and names that the host process assigns."""

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
        """Load a graph from a file, and create the groups that it uses.

        Args:
            name: name for the graph.
            path: the MindIR file.
            groups: name and ranks of each group.
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
        """Store arrays of the host, given as (id, array, MindSpore's name of the type to store)."""
        for array_id, array, dtype in arrays:
            self._arrays[array_id] = self._mindspore.Tensor(array).astype(_type(dtype))

    def run(
        self,
        name: str,
        inputs: list[int],
        variables: dict[str, int],
        returned: list[int],
        written: dict[str, int],
    ) -> dict[int, np.ndarray]:
        """Run a graph; return the scalars among its results, such as a loss, by id.

        Args:
            name: name of the graph.
            inputs: ids of its arguments, in order.
            variables: id of the array that each variable is set to before.
            returned: ids for its results.
            written: id for the value of each variable afterwards.
        """
        graph = self._graphs[name]
        parameters = graph.parameters_dict() if variables else {}
        for variable, array_id in variables.items():
            array = self._arrays.pop(array_id)
            if array is not parameters[variable]:
                # A copy, since a graph may return one array as several results, such as zeros.
                copy = self._mindspore.Tensor(self._plain(array)).astype(array.dtype)
                parameters[variable].set_data(copy)
        results = graph(*(self._arrays[array_id] for array_id in inputs))
        self._arrays.update(zip(returned, results, strict=True))
        self._arrays.update({array_id: parameters[v] for v, array_id in written.items()})
        return {
            array_id: self._plain(result)
            for array_id, result in zip(returned, results, strict=True)
            if result.size == 1
        }

    def get(self, number: int) -> np.ndarray:
        """Return an array, in a type that NumPy has."""
        return self._plain(self._arrays[number])

    def _plain(self, array: Any) -> np.ndarray:
        if array.dtype == self._mindspore.bfloat16:
            array = array.astype(self._mindspore.float32)
        return array.asnumpy()

    def forget(self, numbers: list[int]) -> None:
        """Delete arrays by their ids."""
        for array_id in numbers:
            self._arrays.pop(array_id, None)


def _numpy(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype.removesuffix("_")


def _type(dtype: str) -> Any:
    import mindspore

    return getattr(mindspore, dtype)


def _shorten_error(message: str) -> str:
    """Return the first 600 characters of an error, without MindSpore's frames around its parts."""
    lines = [line.strip(" -") for line in message.splitlines()]
    return " ".join(line for line in lines if line)[:600]


def _die_with_parent(host: int) -> None:
    """Let the kernel kill this process when its host process dies, even in a blocking call.

    The kernel watches the thread that started this process, which in graphtrain is the main thread.
    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != host:  # the host died before prctl
        os._exit(1)


def main() -> None:
    """Execute the commands of the host process until it closes the connection."""
    # Cluster schedulers signal all processes of a run; a rank is stopped by its host process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent(int(os.environ["GRAPHTRAIN_RANK_HOST"]))
    device, role = os.environ["GRAPHTRAIN_RANK_DEVICE"], os.environ.get("MS_ROLE")
    if role == "MS_SCHED":  # the process through which ranks connect
        Rank(device, is_alone=False)
        return
    stacks = open(os.environ["GRAPHTRAIN_RANK_STACKS"], "w")  # noqa: SIM115  # until the end
    faulthandler.register(signal.SIGUSR1, file=stacks)
    with Connection(int(os.environ["GRAPHTRAIN_RANK_PIPE"])) as host:
        try:
            rank = Rank(device, is_alone=role is None)
        except Exception as error:
            host.send((None, f"{type(error).__name__}: {_shorten_error(str(error))}"))
            os._exit(1)
        host.send((rank.rank, ""))
        while True:
            try:
                method_name, deleted_ids, *arguments = host.recv()
            except EOFError:
                break
            try:
                rank.forget(deleted_ids)
                host.send((True, getattr(rank, method_name)(*arguments)))
            except Exception as error:
                host.send((False, f"{type(error).__name__}: {_shorten_error(str(error))}"))
    os.killpg(0, signal.SIGKILL)  # MindSpore's own shutdown waits for ranks that may have died


if __name__ == "__main__":
    main()
