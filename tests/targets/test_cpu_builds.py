"""The CPU service from end to end: what is built serves rightly, refuses what is malformed, and ends cleanly."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import packager
from benchmarks.load import load, request_bytes
from packager.errors import VerificationError
from packager.results import TargetResult
from packager.room import kind_named
from packager.targets.cpu.abuse import binary_request, exchange, post
from packager.targets.cpu.client import Client
from packager.targets.cpu.infer import Model, Session
from packager.targets.cpu.serving import Service, running, started
from tests.builders import BOOL, FLOAT, INT64, STRING, model, relu, save, value

DTYPES = {
    "float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE, "float16": TensorProto.FLOAT16,
    "int8": TensorProto.INT8, "int16": TensorProto.INT16, "int32": TensorProto.INT32, "int64": INT64,
    "uint8": TensorProto.UINT8, "uint16": TensorProto.UINT16, "uint32": TensorProto.UINT32,
    "uint64": TensorProto.UINT64, "bool": BOOL, "object": STRING,
}  # fmt: skip


def build(path: Path, out: Path, **more) -> TargetResult:
    """Build an ONNX file, or a manifest, for the CPU service alone."""
    if path.suffix == ".toml":
        return packager.build(manifest=path, out=out, cache=False, **more).targets[0]
    return packager.build(path, targets=["cpu"], out=out, cache=False, **more).targets[0]


def passed(path: Path, out: Path) -> Path:
    """The folder of a bundle that passed at level runtime."""
    result = build(path, out)
    assert result.status == "passed", result.message
    assert result.verdict is not None and result.verdict.level == "runtime"
    return out / str(result.bundle)


def manifest(folder: Path, model_file: Path, options: str) -> Path:
    """A manifest beside a model, with options of the one target."""
    path = folder / "packager.toml"
    path.write_text(f'[model]\npath = "{model_file.name}"\n[targets.cpu]\n{options}\n')
    return path


def run(bundle: Path, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Over HTTP, gRPC and in process, which must agree."""
    with kind_named("cpu").load().runner(bundle) as runner:
        outputs: dict[str, np.ndarray] = runner.run(feeds)
    return outputs


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of ``score = Relu(x @ w)``, whose rows are independent. Not verified: tests do that."""
    folder = tmp_path_factory.mktemp("dense")
    weights = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(3, 2), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["score"])]
    path = save(model(nodes, [value("x")], [value("score", FLOAT, ["n", 2])], [weights]), folder / "dense.onnx")
    report = packager.build(path, targets=["cpu"], out=folder / "dist", cache=False, verify=False)
    return folder / "dist" / str(report.targets[0].bundle)


@pytest.fixture(scope="module")
def service(dense: Path) -> Iterator[Service]:
    """One service for the tests that only ask."""
    with running(dense) as made:
        yield made


def address(service: Service) -> str:
    return str(urlsplit(service.http).netloc)


def ask(service: Service, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an answer."""
    with closing(http.client.HTTPConnection(address(service), timeout=60)) as link:
        link.request(method, path, body or None, headers)
        answer = link.getresponse()
        content = answer.read()
    return answer.status, json.loads(content)


# What it answers


@pytest.mark.parametrize("dims", [("n", 3), (2, "m"), ()], ids=str)
def test_every_dtype_is_exact_over_http_and_grpc(tmp_path: Path, dims: tuple[int | str, ...]):
    names = list(DTYPES)
    nodes = [helper.make_node("Identity", [f"in/{name}:0"], [f"out/{name}"]) for name in names]
    inputs = [value(f"in/{name}:0", DTYPES[name], dims) for name in names]
    outputs = [value(f"out/{name}", DTYPES[name], dims) for name in names]
    built = passed(save(model(nodes, inputs, outputs), tmp_path / "m.onnx"), tmp_path / "dist")
    shape = tuple(dim if isinstance(dim, int) else 4 for dim in dims)
    feeds = {f"in/{name}:0": extremes(name, shape) for name in names}
    found = run(built, feeds)
    for name in names:
        given, got = feeds[f"in/{name}:0"], found[f"out/{name}"]
        assert (got.dtype, got.shape) == (given.dtype, given.shape), name
        np.testing.assert_array_equal(got, given)
    assert json.loads((built / "service.json").read_text())["rows_independent"] == (dims[:1] == ("n",))
    if dims[:1] == ("n",):
        empty = {name: array[:0] for name, array in feeds.items()}
        assert all(array.shape == (0, 3) for array in run(built, empty).values())


def extremes(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The ends of a dtype's range, over and over."""
    if name == "object":
        found = np.array(["naïve 名前 🎈", "", "line\nend", "a" * 300], object)
    elif name == "bool":
        found = np.array([True, False])
    elif name.startswith("float"):
        limits = np.finfo(name)
        found = np.array([limits.max, limits.min, limits.tiny, -0.0, 1.5], name)
    else:
        found = np.array([np.iinfo(name).max, np.iinfo(name).min, 1], name)
    return np.resize(found, shape)


def test_the_protocols_paths(service: Service):
    assert ask(service, "GET", "/v2/health/live") == (200, {"live": True})
    assert ask(service, "GET", "/v2/health/ready") == (200, {"ready": True})
    status, server = ask(service, "GET", "/v2")
    assert (status, server["name"], server["extensions"]) == (200, "ONNX Runtime", ["binary_tensor_data"])
    wanted = {
        "name": "dense", "versions": ["0.0.0"], "platform": "onnxruntime_onnxv1",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "score", "datatype": "FP32", "shape": [-1, 2]}],
    }  # fmt: skip
    assert (
        ask(service, "GET", "/v2/models/dense")
        == ask(service, "GET", "/v2/models/dense/versions/0.0.0")
        == (200, wanted)
    )
    assert ask(service, "GET", "/v2/models/dense/ready") == (200, {"name": "dense", "ready": True})
    for path in ("/v2/models/other", "/v2/models/dense/versions/2", "/v3"):
        assert ask(service, "GET", path)[0] == 404


def test_json_and_bytes_mixed(service: Service):
    body = json.dumps(
        {"id": "a", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [[1, 0, 1]]}]}
    ).encode()
    status, answer = ask(service, "POST", "/v2/models/dense/infer", body)
    assert (status, answer["id"], answer["outputs"][0]["data"]) == (200, "a", [4.0, 6.0])


def test_a_client_that_somebody_else_maintains(dense: Path, service: Service):
    """tritonclient speaks the same protocol, over both transports."""
    import tritonclient.grpc as over_grpc
    import tritonclient.http as over_http

    x = np.array([[1, 0, 1]], np.float32)
    for types, url in ((over_http, address(service)), (over_grpc, urlsplit(service.grpc).netloc)):
        with closing(types.InferenceServerClient(url)) as client:
            assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("dense")
            tensor = types.InferInput("x", [1, 3], "FP32")
            tensor.set_data_from_numpy(x)
            answer = client.infer("dense", [tensor], request_id="7")
            np.testing.assert_array_equal(answer.as_numpy("score"), [[4, 6]])


def test_metrics_count_what_was_asked(service: Service):
    def count() -> float:
        with closing(http.client.HTTPConnection(address(service), timeout=60)) as link:
            link.request("GET", "/metrics")
            text = link.getresponse().read().decode()
        found = re.search(r'inference_requests_total\{protocol="http",status="400"\} ([\d.]+)', text)
        assert 'inference_model_info{name="dense"' in text and "inference_run_rows_bucket" in text
        return float(found[1]) if found else 0.0

    before = count()
    assert post(address(service), "/v2/models/dense/infer", b"{") == 400
    assert count() == before + 1


def test_an_answer_is_the_librarys_whoever_is_asked(dense: Path, service: Service):
    x = np.array([[1, 2, 3], [-1, -2, -3]], np.float32)
    alone = Session(dense).run({"x": x})["score"]
    for url in (None, service.http, service.grpc):
        with closing(Model(dense, url)) as asked:
            np.testing.assert_array_equal(asked.run({"x": x})["score"], alone)
            assert asked.info["device"] == (url or "CPU")
            with pytest.raises(ValueError, match="no array is given for input 'x'"):
                asked.run({})
    with pytest.raises(ValueError, match="is no service"):
        Client(dense, "localhost:8080")
    with pytest.raises(RuntimeError, match="doesn't serve 'dense'"):
        Client(dense, "http://127.0.0.1:9")


# What it survives


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def schema_value(schema: Mapping[str, Any], every: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values of an OpenAPI schema that ours uses, each part now and then replaced by anything at all."""
    if "$ref" in schema:
        return schema_value(every[schema["$ref"].rpartition("/")[2]], every)
    if "const" in schema:
        right: st.SearchStrategy[Any] = st.just(schema["const"])
    elif "enum" in schema:
        right = st.sampled_from(schema["enum"])
    elif "oneOf" in schema:
        right = st.one_of([schema_value(each, every) for each in schema["oneOf"]])
    elif schema["type"] == "object":
        right = st.fixed_dictionaries(
            {name: schema_value(schema["properties"][name], every) for name in schema.get("required", ())},
            optional={
                name: schema_value(each, every)
                for name, each in schema["properties"].items()
                if name not in schema.get("required", ())
            },
        )
    elif "prefixItems" in schema:
        right = st.tuples(*[schema_value(each, every) for each in schema["prefixItems"]]).map(list)
    elif schema["type"] == "array":
        right = st.lists(schema_value(schema["items"], every), min_size=schema.get("minItems", 0), max_size=6)
    else:
        plain = {
            "string": st.text(max_size=8), "boolean": st.booleans(), "number": st.floats(),
            "integer": st.integers(schema.get("minimum"), schema.get("maximum")),
        }  # fmt: skip
        right = plain[schema["type"]]
    return st.integers(0, 9).flatmap(lambda chance: VALUES if chance == 0 else right)


def test_a_thousand_malformed_requests_are_refused_and_none_ends_it(service: Service):
    """Drawn from the service's own OpenAPI document, with any part wrong; bytes and header lengths at random too."""
    document = ask(service, "GET", "/openapi.json")[1]
    every = document["components"]["schemas"]
    path = "/v2/models/dense/infer"
    assert document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    seen: dict[int, int] = {}
    link = http.client.HTTPConnection(address(service), timeout=60)
    bodies = st.one_of(
        schema_value(every["Request"], every).map(lambda made: json.dumps(made).encode()), st.binary(max_size=64)
    )
    lengths = st.none() | st.integers(-2, 80).map(str) | st.text(st.characters(codec="latin-1", categories=["L", "N"]))

    @settings(
        max_examples=1000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(bodies, lengths)
    def send(body: bytes, length: str | None) -> None:
        headers = {} if length is None else {"Inference-Header-Content-Length": length.encode("latin-1")}
        link.request("POST", path, body, headers)  # bytes of a header travel as they are
        answer = link.getresponse()
        content = answer.read()
        seen[answer.status] = seen.get(answer.status, 0) + 1
        assert answer.status in (200, 400), content
        assert json.loads(content).keys() >= ({"error"} if answer.status == 400 else {"outputs"})

    with closing(link):
        send()
    assert seen[400] >= 900, seen
    assert ask(service, "GET", "/v2/health/ready")[0] == 200
    service.check()


def test_too_long_too_slow_and_cut_off(dense: Path):
    with running(dense, "--max-body-mb", "1") as made:
        where = address(made)
        start = f"POST /v2/models/dense/infer HTTP/1.1\r\nHost: {where}\r\n".encode()
        head = b"Content-Length: 1048577\r\n\r\n"
        told = exchange(where, start + head, wait=True)
        assert told.startswith(b"HTTP/1.1 413") and b"connection: close" in told.lower()
        chunk = b"80000\r\n" + b" " * 0x80000 + b"\r\n"
        told = exchange(where, start + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 3, wait=True)
        assert told.startswith(b"HTTP/1.1 413")
        exchange(where, start + b"Content-Length: 500\r\n\r\n{", wait=False)
        x = np.zeros((100_000, 3), np.float32)
        for url in (made.http, made.grpc):
            with closing(Client(dense, url)) as client, pytest.raises(RuntimeError, match=r"413|RESOURCE_EXHAUSTED"):
                client.run({"x": x})
        with closing(Client(dense, made.http)) as client:
            assert client.run({"x": x[:2]})["score"].shape == (2, 2)


def test_more_than_it_takes_is_told_to_come_again(tmp_path: Path):
    """With room for one, a request that is still arriving keeps others out, until its sender hangs up."""
    report = packager.build(relu(tmp_path / "m.onnx"), targets=["cpu"], out=tmp_path / "d", cache=False, verify=False)
    built = tmp_path / "d" / str(report.targets[0].bundle)
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}).encode()
    with running(built, "--max-in-flight", "1") as made:
        where = urlsplit(made.http)
        with socket.create_connection((where.hostname or "", where.port or 0), timeout=60) as slow:
            slow.sendall(
                f"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n{{".encode()
            )
            until = time.monotonic() + 30
            while (status := post(where.netloc, "/v2/models/m/infer", body)) == 200 and time.monotonic() < until:
                pass
            assert status == 429
        until = time.monotonic() + 30
        while (status := post(where.netloc, "/v2/models/m/infer", body)) == 429 and time.monotonic() < until:
            pass
        assert status == 200


def test_load_loses_nothing(dense: Path, service: Service):
    head, rest = binary_request(Session(dense), {"x": np.ones((1, 3), np.float32)})
    result = load(service.http, request_bytes(address(service), "/v2/models/dense/infer", head, rest), 8, 5.0)
    assert set(result.statuses) == {200} and result.lost == 0
    assert result.statuses[200] > 100


def test_what_was_begun_is_answered_when_it_is_told_to_stop(tmp_path: Path):
    """A run of a second or so, SIGTERM in the middle of it: the answer comes, then the end with status 0."""
    trip = numpy_helper.from_array(np.array(100_000, np.int64), "trip")
    true = numpy_helper.from_array(np.array(True), "true")
    inner = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Add", ["v", "v0"], ["v2"])], "body",
        [value("i", INT64, []), value("c", BOOL, []), value("v", FLOAT, ["n", 3])],
        [value("c2", BOOL, []), value("v2", FLOAT, ["n", 3])], [numpy_helper.from_array(np.float32(1), "v0")],
    )  # fmt: skip
    nodes = [helper.make_node("Loop", ["trip", "true", "x"], ["y"], body=inner)]
    path = save(model(nodes, [value("x")], [value("y")], [trip, true]), tmp_path / "slow.onnx")
    report = packager.build(
        manifest=manifest(tmp_path, path, "max_batch = 0"), out=tmp_path / "d", cache=False, verify=False
    )
    built = tmp_path / "d" / str(report.targets[0].bundle)
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [0, 0, 0]}]}).encode()
    with started(built) as made:
        with closing(http.client.HTTPConnection(address(made), timeout=120)) as link:
            link.request("POST", "/v2/models/slow/infer", body)
            until = time.monotonic() + 60
            while ask_in_flight(made) == 0 and time.monotonic() < until:
                pass
            made.process.send_signal(signal.SIGTERM)
            answer = link.getresponse()
            assert answer.status == 200
            assert json.loads(answer.read())["outputs"][0]["data"] == [100_000.0] * 3
        assert made.process.wait(60) == 0
        with pytest.raises(VerificationError, match="ended with status 0"):
            made.check()


def ask_in_flight(made: Service) -> float:
    """Requests being answered, by the metrics."""
    with closing(http.client.HTTPConnection(address(made), timeout=60)) as link:
        link.request("GET", "/metrics")
        text = link.getresponse().read().decode()
    found = re.search(r"^inference_in_flight ([\d.]+)", text, re.MULTILINE)
    assert found
    return float(found[1])
