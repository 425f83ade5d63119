"""Start of a server: its address is logged when it answers, not before."""

from toy_engine import ToyEngine

from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.run.serving.http.server import ServerSettings, _Lifecycle
from graphtrain.run.serving.worker import OpenedModel


def test_the_address_is_logged_when_requests_are_taken():
    logged = []

    def log(line: str) -> None:
        logged.append((line.partition(" ")[0], lifecycle.worker.status))

    model = OpenedModel(ToyEngine(), ByteTokenizer(), (), None)
    settings = ServerSettings(model_name="toy")
    lifecycle = _Lifecycle(lambda: model, "http://127.0.0.1:8000", settings, log)
    lifecycle.worker.start()
    lifecycle.worker.opened()
    lifecycle.worker.stop()
    assert lifecycle.worker.join(60)
    assert [word for word, _ in logged] == ["listening", "ready"]
    assert "loading" not in [status for _, status in logged]
