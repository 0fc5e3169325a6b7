"""Verification: the bundle's repository, unmodified, loaded and asked in every way that could tell a fault.

Every golden case goes over HTTP and over gRPC. Before that, rows are sent alone, two together, and many at the same
time: a configuration that merges requests wrongly loads like any other and fails only then. Triton's own statistics
must show that requests were merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from packager import parity
from packager.errors import VerificationError
from packager.feeds import read_description
from packager.goldens import Array
from packager.room import Runner, RuntimeInfo
from packager.rows import joined
from packager.targets.triton import kit
from packager.targets.triton.config import safety_objection
from packager.targets.triton.infer import Model
from packager.targets.triton.repository import REPOSITORY
from packager.targets.triton.server import Server, serving
from packager.traffic import difference, in_parallel, requests_of

CONFIG = "config.pbtxt"
PARALLEL = 8
"""Requests sent at the same time for each instance of the model, up to :data:`MOST`."""

MOST = 64
ROUNDS = 10
"""How often parallel requests are sent before Triton is said not to merge any: whether two meet is a matter of time."""


@contextmanager
def served(bundle: Path) -> Iterator[Runner]:
    """Serve a bundle's model.

    Raises:
        VerificationError: Triton refuses the model (the reason is Triton's), serves another signature than the
            bundle's, or answers differently to requests alone, together and in parallel.
        ToolchainMissing: there is no server.
    """
    try:
        described = read_description(bundle)
        golden = parity.read_golden(bundle / "golden")
    except ValueError as error:
        raise VerificationError(str(error), "build the bundle again") from error
    check_repository(bundle / REPOSITORY, described.name)
    with serving(bundle / REPOSITORY) as server:
        server.load(described.name)
        with ExitStack() as stack:
            try:
                http, grpc = (stack.enter_context(closing(Model(bundle, url))) for url in (server.http, server.grpc))
            except (ValueError, RuntimeError) as error:
                raise VerificationError(f"Triton serves another model: {error}", "build the bundle again") from error
            runner = _Runner(http, grpc, golden, _info(server, http))
            _check_traffic(server, grpc, described.name, golden)
            yield runner


def check_repository(repository: Path, name: str) -> None:
    """Let nothing through that Triton would run as code: a bundle holds a configuration, models and their data.

    A server looks for the backend's library beside the model first, and a configuration can name code in many ways.

    Raises:
        VerificationError: the repository has something else; the file is named.
    """
    place = f"{REPOSITORY}/{name}"
    for path in sorted(repository.rglob("*")):
        inner = path.relative_to(repository).parts
        code = path.suffix in (".so", ".py", ".pyc", ".gz", ".sh") or ".so." in path.name
        strange = inner[0] != name or len(inner) > 3 or (len(inner) == 2 and path.is_file() and inner[1] != CONFIG)
        if path.is_symlink() or code or strange:
            raise VerificationError(
                f"{REPOSITORY}/{'/'.join(inner)} has no place in the bundle, and Triton might run it",
                "fetch the bundle again from where it was built",
            )
    file = repository / name / CONFIG
    if not file.is_file():
        raise VerificationError(f"{place}/{CONFIG} is missing", "build the bundle again")
    told = safety_objection(file.read_text(encoding="utf-8", errors="replace"))
    if told:
        raise VerificationError(f"{place}/{CONFIG}: {told}", "build the bundle again")


def _info(server: Server, model: Model) -> RuntimeInfo:
    return runtime_info(model.info["version"], server.real_backend)


def runtime_info(version: str, real_backend: bool) -> RuntimeInfo:
    """What ran a bundle, for the verdict: the server's version, and which backend it loaded models with."""
    release = kit.pins()["release"]
    if real_backend:
        return RuntimeInfo(f"Triton core {version} + onnxruntime backend", version, "CPU", "runtime")
    return RuntimeInfo(
        name=f"Triton core {version} + python-hosted onnxruntime",
        version=kit.pins()["onnxruntime"],
        device="CPU",
        level="emulated",
        reason=f"the server of release {release} loaded and served the repository, but ONNX Runtime ran the model in a "
        f"python-hosted stand-in for the C++ onnxruntime backend",
        details=(("server", version), ("protocols", "HTTP and gRPC")),
    )


class _Runner:
    """A served model behind the engine's Protocol."""

    def __init__(self, http: Model, grpc: Model, golden: parity.Golden, info: RuntimeInfo) -> None:
        self._http, self._grpc, self._golden = http, grpc, golden
        self.info = info

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Ask over both protocols; the answers must be the same.

        Raises:
            VerificationError: the server refused or failed, or the protocols disagree.
        """
        over_http, over_grpc = _ask(self._http, feeds), _ask(self._grpc, feeds)
        told = difference(over_http, over_grpc, self._golden)
        if told:
            raise VerificationError(f"HTTP and gRPC give different answers: {told}")
        return over_grpc


def _ask(model: Model, feeds: Mapping[str, Array]) -> dict[str, Array]:
    try:
        outputs: dict[str, Array] = model.run(feeds)
        return outputs
    except (ValueError, RuntimeError) as error:
        raise VerificationError(str(error)) from error


def _check_traffic(server: Server, model: Model, name: str, golden: parity.Golden) -> None:
    """Alone, together and in parallel: all the same answers.

    Raises:
        VerificationError: an answer differs or fails, or a batching server merges nothing.
    """
    count = min(PARALLEL * _instances(server, name), MOST)
    requests = requests_of(golden, model.max_batch > 0, count)
    alone = [_ask(model, feeds) for feeds in requests]
    if model.max_batch > 1:
        two = _ask(model, joined(requests[:2]))
        for index in range(2):
            row = {output: array[index : index + 1] for output, array in two.items()}
            _agree(alone[index], row, golden, "a batch of 2")
    for _ in range(ROUNDS if model.max_batch > 1 and count < MOST else 1):
        before = _counts(server, name)
        for one, answer in zip(alone, in_parallel(lambda feeds: _ask(model, feeds), requests), strict=True):
            _agree(one, answer, golden, "parallel requests")
        inferences, executions = (now - then for now, then in zip(_counts(server, name), before, strict=True))
        if min(inferences, server.inferences_by_metrics(name)) < len(requests):
            raise VerificationError(f"Triton counts {inferences} inferences for {len(requests)} requests")
        if executions < inferences:
            return
    if model.max_batch > 1:
        raise VerificationError(
            f"Triton merged none of {len(requests)} parallel requests", "is the machine overloaded?"
        )


def _agree(alone: Mapping[str, Array], other: Mapping[str, Array], golden: parity.Golden, how: str) -> None:
    told = difference(alone, other, golden)
    if told:
        raise VerificationError(
            f"Triton answers differently to {how} than to one request alone: {told}",
            "the rows of a batch influence each other: build with max_batch = 0",
        )


def _instances(server: Server, name: str) -> int:
    """How many copies of the model run."""
    groups = server.get(f"/v2/models/{quote(name, safe='')}/config").get("instance_group")
    return sum(int(each.get("count", 1)) for each in groups) if isinstance(groups, list) and groups else 1


def _counts(server: Server, name: str) -> tuple[int, int]:
    """Triton's inference and execution counts of the model, all versions together."""
    answer = server.get(f"/v2/models/{quote(name, safe='')}/stats")
    stats = answer["model_stats"]
    if not isinstance(stats, list):
        raise VerificationError("Triton's statistics have no model_stats")
    return sum(int(each["inference_count"]) for each in stats), sum(int(each["execution_count"]) for each in stats)
