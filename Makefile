# packager: `make demo` and `make test` set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2
# Node and npm come from a wheel where the machine has none.
EXTRAS := openvino,web,triton,ios,tensorrt,cpu,npu,dev$(if $(shell command -v npm),,$(shell printf ,)node)
# ONNX Runtime's wheels report usage unless told not to before they are loaded; packager tells its children itself.
export ORT_DISABLE_TELEMETRY := 1

.PHONY: setup browser swift-toolchain headers cpu-emulator demo test check bench memory corpus npu-table faults fuzz conformance clean format

# Where a runtime can't be had, its own words say why and what to do; the tests that need it skip, and fail in CI.
setup: $(STAMP)
	@$(BIN)/python -m packager.targets.triton.kit >/dev/null || true

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

# The web target is verified in a real browser: as root on Debian one is installed, elsewhere this says how to get it.
browser:
	@sh tests/targets/get_browser.sh

# The Swift package of the ios target is compiled and run where there is a Swift toolchain: as root on Debian this gets
# one (3 GB under the user's cache folder, some minutes). Without it the model file itself is run.
swift-toolchain:
	@sh tests/targets/get_swift.sh

# ONNX Runtime's C headers, which its wheels lack, to compile the C++ of bundles with.
headers:
	@sh tests/targets/get_headers.sh .runtimes/onnxruntime-headers || echo "ONNX Runtime's headers can't be had" >&2

# An emulator of older CPUs: int8 is run as machines without VNNI run it.
cpu-emulator:
	@sh tests/get_cpu_emulator.sh

demo: setup browser
	$(BIN)/python examples/fetch.py examples/orientation
	$(BIN)/packager build --manifest examples/orientation/packager.toml --out examples/orientation/dist

test: setup browser headers cpu-emulator
	$(BIN)/python examples/fetch.py .corpus
	$(BIN)/python -m pytest -n $(JOBS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python examples/fetch.py .corpus
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/web_loader.py

memory: setup
	$(BIN)/python benchmarks/memory.py

corpus: setup
	$(BIN)/python examples/fetch.py .corpus
	$(BIN)/python benchmarks/corpus_table.py docs/corpus.md

npu-table: setup
	$(BIN)/python examples/fetch.py .corpus
	$(BIN)/python benchmarks/npu_table.py docs/npu.md

# Break bundles of every kind on purpose; prints what was caught, and writes docs/faults.md.
faults: setup browser
	$(BIN)/python -m tests.faults.run --out docs/faults.md

# Odd input, and kills at random moments, for FUZZ_MINUTES; findings are written to fuzz-findings/.
FUZZ_MINUTES ?= 10
fuzz: setup
	$(BIN)/python -m tests.fuzz.run --minutes $(FUZZ_MINUTES)

# Every node case of onnx through CONFORMANCE_KINDS, into docs/conformance.md; interrupted, it goes on later.
CONFORMANCE_KINDS ?= openvino,web,triton
conformance: setup browser
	$(BIN)/python -m tests.conformance.run --kinds $(CONFORMANCE_KINDS) --jobs $(JOBS) --out docs/conformance.md

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .corpus .runtimes examples/*/dist
