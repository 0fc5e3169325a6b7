"""Verification: the bundle's repository, unmodified, loaded and asked in every way that could tell a fault.

Every golden case goes over HTTP and over gRPC. Before that, rows are sent alone, two together, and many at the same
time: a configuration that merges requests wrongly loads like any other and fails only then. Triton's own statistics
must show that requests were merged.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from packager import parity
from packager.errors import VerificationError
from packager.feeds import read_description
from packager.goldens import Array
from packager.room import Runner, RuntimeInfo
from packager.targets.triton import kit
from packager.targets.triton.config import safety_objection, without_gpu
from packager.targets.triton.ensemble import PARTS, WHOLE, served_name
from packager.targets.triton.infer import Model
from packager.targets.triton.repository import CONFIG, REPOSITORY
from packager.targets.triton.server import Server, serving
from packager.targets.triton.traffic import (
    PARALLEL,
    agree,
    ask,
    check_steps,
    difference,
    in_parallel,
    in_twos,
    requests_of,
)

MOST = 64
"""Requests sent at the same time, however many instances there are."""

SETTLE_SECONDS = 10.0
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
    texts = check_repository(bundle / REPOSITORY, described.name)
    with serving(bundle / REPOSITORY, rate_limited=bool(described.options.get("rate_limit"))) as server:
        overrides = {name: "" if server.real_backend else without_gpu(text) for name, text in texts.items()}
        for name in sorted(texts, key=lambda name: (name == served_name(described.name, WHOLE), name)):
            server.load(name, overrides[name])  # an ensemble after its steps
        with ExitStack() as stack:
            try:
                http, grpc = (stack.enter_context(closing(Model(bundle, url))) for url in (server.http, server.grpc))
            except (ValueError, RuntimeError) as error:
                raise VerificationError(f"Triton serves another model: {error}", "build the bundle again") from error
            left_out = ["with KIND_CPU in place of KIND_GPU"] if any(overrides.values()) else []
            if described.options.get("accelerator", "none") != "none":
                left_out.append(f"without the accelerator {described.options['accelerator']}")
            info = runtime_info(http.info["version"], server.real_backend, left_out)
            _check_traffic(server, grpc, described.name, golden)
            answered = check_steps(bundle, server.http) and check_steps(bundle, server.grpc)
            if answered:
                info = replace(info, details=(*info.details, ("ensemble", f"{answered} golden cases of its steps")))
            yield _Runner(http, grpc, golden, info)


def check_repository(repository: Path, name: str) -> dict[str, str]:
    """Let nothing through that Triton would run as code: a bundle holds configurations, models and their data.

    A server looks for the backend's library beside the model first, and a configuration can name code in many ways.

    Returns:
        The configurations' texts, by the names of their models: that of the bundle, and those of its ensemble.

    Raises:
        VerificationError: the repository has something else; the file is named.
    """
    allowed = {served_name(name, part) for part in (*PARTS, WHOLE)}
    for path in sorted(repository.rglob("*")):
        inner = path.relative_to(repository).parts
        code = path.suffix in (".so", ".py", ".pyc", ".gz", ".sh") or ".so." in path.name
        strange = inner[0] not in allowed or len(inner) > 3
        if len(inner) == 2 and path.is_file():
            strange = strange or (inner[1] != CONFIG and not re.fullmatch(r"labels-\d+\.txt", inner[1]))
        if path.is_symlink() or code or strange:
            raise VerificationError(
                f"{REPOSITORY}/{'/'.join(inner)} has no place in the bundle, and Triton might run it",
                "fetch the bundle again from where it was built",
            )
    texts = {}
    for each in {name, *(path.name for path in repository.iterdir())}:
        file, place = repository / each / CONFIG, f"{REPOSITORY}/{each}/{CONFIG}"
        if not file.is_file():
            raise VerificationError(f"{place} is missing", "build the bundle again")
        texts[each] = file.read_text(encoding="utf-8", errors="replace")
        told = safety_objection(texts[each])
        if told:
            raise VerificationError(f"{place}: {told}", "build the bundle again")
    return texts


def runtime_info(version: str, real_backend: bool, left_out: Sequence[str] = ()) -> RuntimeInfo:
    """What ran a bundle, for the verdict: the server's version, which backend it loaded models with, and what of the
    configuration a stand-in left out."""
    release = kit.pins()["release"]
    if real_backend:
        name = f"Triton core {version} + onnxruntime backend"
        return RuntimeInfo(name, version, "CPU", "runtime", details=(("made for release", release),))
    return RuntimeInfo(
        name=f"Triton core {version} + python-hosted onnxruntime",
        version=kit.pins()["onnxruntime"],
        device="CPU",
        level="emulated",
        reason=f"the server of release {release} loaded and served the repository, but ONNX Runtime ran the model in a "
        f"python-hosted stand-in for the C++ onnxruntime backend" + "".join(f", {each}" for each in left_out),
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
        over_http: dict[str, Array] = ask(self._http, feeds)
        over_grpc: dict[str, Array] = ask(self._grpc, feeds)
        told = difference(over_http, over_grpc, self._golden)
        if told:
            raise VerificationError(f"HTTP and gRPC give different answers: {told}")
        return over_grpc


def _check_traffic(server: Server, model: Model, name: str, golden: parity.Golden) -> None:
    """Alone, together and in parallel: all the same answers.

    Raises:
        VerificationError: an answer differs or fails, or a batching server merges nothing.
    """
    count = min(PARALLEL * _instances(server, name), MOST)
    requests = requests_of(golden, model.max_batch > 0, count)
    sent = _counts(server, name)[0] + count + (2 if model.max_batch > 1 else 0)
    alone = [ask(model, feeds) for feeds in requests]
    in_twos(model, requests, alone, golden)
    for _ in range(ROUNDS if model.max_batch > 1 and count < MOST else 1):
        before = _settled(server, name, sent)
        for one, answer in zip(alone, in_parallel(lambda: nullcontext(model), requests), strict=True):
            agree(one, answer, golden, "parallel requests")
        sent += count
        inferences, executions = (now - then for now, then in zip(_settled(server, name, sent), before, strict=True))
        if min(inferences, server.inferences_by_metrics(name)) < count:
            raise VerificationError(f"Triton counts {inferences} inferences for {count} requests")
        if executions < inferences:
            return
    if model.max_batch > 1:
        raise VerificationError(
            f"Triton merged none of {len(requests)} parallel requests", "is the machine overloaded?"
        )


def _instances(server: Server, name: str) -> int:
    """How many copies of the model run."""
    groups = server.get(f"/v2/models/{quote(name, safe='')}/config").get("instance_group")
    return sum(int(each.get("count", 1)) for each in groups) if isinstance(groups, list) and groups else 1


def _settled(server: Server, name: str, wanted: int) -> tuple[int, int]:
    """The counts when they have come up to ``wanted`` inferences: Triton counts a request after it has answered it."""
    end = time.monotonic() + SETTLE_SECONDS
    while (counts := _counts(server, name))[0] < wanted and time.monotonic() < end:
        time.sleep(0.02)
    return counts


def _counts(server: Server, name: str) -> tuple[int, int]:
    """Triton's inference and execution counts of the model, all versions together."""
    answer = server.get(f"/v2/models/{quote(name, safe='')}/stats")
    stats = answer["model_stats"]
    if not isinstance(stats, list):
        raise VerificationError("Triton's statistics have no model_stats")
    return sum(int(each["inference_count"]) for each in stats), sum(int(each["execution_count"]) for each in stats)
