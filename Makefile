# The one entry. `make` lists what there is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
CXX_SOURCES := $(wildcard src/lily_native/*.cpp src/lily_native/*.h src/lily_native/*.mm src/lily_bench/*.cpp \
    src/lily_bench/*.h tests/native/*.cpp tests/native/*.h tests/cuda_double/*.cpp tests/cuda_double/*.h \
    tests/metal_double/*.cpp tests/metal_double/*.h tests/metal_double/*.mm tests/metal_double/include/Foundation/*.h)
PACKAGE_SOURCES := pyproject.toml CMakeLists.txt $(shell find python src shaders tools -name '*.py' -o -name '*.cpp' \
    -o -name '*.h' -o -name '*.mm' -o -name '*.metal' -o -name '*.txt' -o -name '*.jinja' -o -name '*.json' -o -name '*.safetensors' -o -name '*.pyi' -o -name py.typed)
PROMPT ?= Tell me a story about a fox named Tim.
K ?=
ARGS ?=
DEVICE ?= cpu
FUZZ_SECONDS ?= 60
RUNS ?= -1
TARGETS ?= safetensors config tokenizer template prompts session

.PHONY: help demo test lint format bench ablation sanitize check-metal check-metal-full check-metal-mutants fuzz clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/installed  ## install Lily into .venv and let the demo model write
	@$(BIN)/lily generate "$(PROMPT)" --no-thinking --max-tokens 200

test: $(VENV)/tested  ## run the tests (K=expression picks some, DEVICE=cpu32 runs the model on that device)
	$(BIN)/python -m pytest $(if $(K),-k "$(K)") --device $(DEVICE) tests

lint: $(VENV)/linted  ## check style, types, the kernel table and docs/KERNELS.md
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy python/lily tools/*.py tools/metal/*.py tests/*.py tests/bench/*.py tests/fuzz/*.py \
	    tests/metal_double/*.py examples/*.py
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(BIN)/python tools/check_style.py
	$(BIN)/python tools/kernel_table.py --shaders shaders --bench shaders/bench --out-dir build/lint \
	    --check src/lily_native/model.cpp --check-docs docs/KERNELS.md
	$(BIN)/python tools/api_docs.py --check

format: $(VENV)/linted  ## rewrite sources in the project's style, docs/KERNELS.md from the shaders, docs/API.md from docstrings
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)
	$(BIN)/python tools/kernel_table.py --shaders shaders --bench shaders/bench --out-dir build/lint \
	    --docs docs/KERNELS.md
	$(BIN)/python tools/api_docs.py

bench: $(VENV)/tested  ## measure decode and prefill of the demo model beside mlx-lm, in one run
	$(BIN)/lily bench peers --context 64 --tokens 64 --prefill 64,512

ablation: $(VENV)/tested $(VENV)/linted  ## measure what design decisions of prefill and decode gain (ARGS="--model synthetic:4")
	JOBS=$(JOBS) BIN=$(abspath $(BIN)) sh tools/ablation.sh $(ARGS)

sanitize: $(VENV)/tested $(VENV)/linted  ## kernel, checkpoint and engine tests under AddressSanitizer and UBSan
	JOBS=$(JOBS) BIN=$(abspath $(BIN)) sh tools/sanitize.sh

check-metal: $(VENV)/metal  ## check the Metal device without a Mac (needs clang-19; README says what this shows)
	$(BIN)/python tools/metal/check.py --jobs $(JOBS)

check-metal-full: $(VENV)/metal  ## the same with every order, width and sanitizer; takes long
	$(BIN)/python tools/metal/check.py --full --keep-going --jobs $(JOBS)

check-metal-mutants: $(VENV)/metal  ## put 40 mistakes into the Metal host code and see which are noticed; takes long
	$(BIN)/python tools/metal/mutate.py

fuzz: $(VENV)/fuzz  ## feed wrong files and prompts to the readers, FUZZ_SECONDS=60 for each of TARGETS, or RUNS=10000
	for target in $(TARGETS); do \
	    mkdir -p build/fuzz/$$target && $(BIN)/python tests/fuzz/harness.py $$target build/fuzz/$$target \
	        tests/fuzz/corpus/$$target -max_total_time=$(FUZZ_SECONDS) -runs=$(RUNS) \
	        -artifact_prefix=build/fuzz/$$target- -print_final_stats=1 || exit 1; \
	done

clean:  ## remove what was built; the next make starts anew
	rm -rf build $(VENV)

$(VENV)/created:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Each stamp is younger than everything that it was made from.
$(VENV)/installed: $(VENV)/created $(PACKAGE_SOURCES)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(BIN)/pip install --quiet --disable-pip-version-check .
	@touch $@

$(VENV)/tested: $(VENV)/installed
	$(BIN)/python tools/requirements.py test | $(BIN)/pip install --quiet --disable-pip-version-check -r /dev/stdin
	@touch $@

$(VENV)/metal: $(VENV)/tested $(VENV)/linted
	$(BIN)/python tools/requirements.py check-metal | $(BIN)/pip install --quiet --disable-pip-version-check -r /dev/stdin
	@touch $@

$(VENV)/fuzz: $(VENV)/installed
	$(BIN)/python tools/requirements.py fuzz | $(BIN)/pip install --quiet --disable-pip-version-check -r /dev/stdin
	@touch $@

$(VENV)/linted: $(VENV)/created pyproject.toml
	$(BIN)/python tools/requirements.py dependencies dev | $(BIN)/pip install --quiet --disable-pip-version-check -r /dev/stdin
	@touch $@
