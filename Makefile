# moestream: everything that is done by hand or by CI, as one command each. `make help` lists them.
# The first use on a machine sets up what it needs: .venv (tools/setup_env), llama.cpp and the libraries in build/.

PYTHON ?= python3
JOBS ?= $(shell nproc)
# more arguments for the commands below, for example: make demo DEMO_ARGS="--experts 256"
DEMO_ARGS ?=
PYTEST_ARGS ?=
CLANG ?= clang
FUZZ_SECONDS ?= 600
CMAKE_ARGS ?=

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
PY := $(BIN)/python
BUILD := build/dev
export PATH := $(BIN):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)
export CTEST_OUTPUT_ON_FAILURE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

ENV_STAMP := $(VENV)/.ready
BUILD_STAMP := $(BUILD)/.installed

# What the installed package is made of. A file that is removed changes its folder, so folders count, too.
SOURCES := $(shell find csrc cmake python third_party/llama.lock tools/build_ffi.py tools/cdef.py \
    -not -path '*/__pycache__*' -not -name '*.pyc' 2>/dev/null | sed 's/ /\\ /g') \
    CMakeLists.txt pyproject.toml LICENSE README.md
C_FILES = $(shell find csrc tests cmake examples bench -name '*.[ch]' 2>/dev/null)
PY_CODE = python tools $(wildcard tests bench examples)

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test check pytest build env format clean distclean archs fuzz \
    check-format check-lint check-types check-layers check-symbols check-cdef ctest ctest-address ctest-thread

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

demo: build ## make the demo model and stream a paragraph from it
	@echo "== demo: moestream demo $(DEMO_ARGS)"
	@$(BIN)/moestream demo $(DEMO_ARGS)

test: check pytest ## every check and every test

pytest: build archs ## the Python tests, against the installed package
	@echo "== pytest"
	@$(PY) -m pytest $(PYTEST_ARGS)

check: check-format check-lint check-layers check-cdef check-types check-symbols ctest ctest-address ctest-thread ## format, lint, types, layers, symbols, cdef, C tests plain and sanitized
	@echo "== check: all passed"

env: $(ENV_STAMP) ## .venv and the system packages a build needs

$(ENV_STAMP): tools/setup_env tools/requirements.txt pyproject.toml
	@PYTHON="$(PYTHON)" tools/setup_env "$(VENV)"
	@touch $@

build: $(BUILD_STAMP) ## build and install into .venv what has changed

# One build tree for the package, the C tests and the tools; llama.cpp is compiled in it once. ninja runs first, so that
# its progress and the compiler's words are seen; pip then finds everything built and only installs.
CONFIGURE = -DMOESTREAM_BUILD_TESTS=ON -DMOESTREAM_BUILD_ARCHS=ON

$(BUILD_STAMP): $(ENV_STAMP) $(SOURCES)
	@echo "== build: llama.cpp, libmoestream and the Python module in $(BUILD) (the first time takes minutes)"
	@mkdir -p $(BUILD)
	@test -f $(BUILD)/build.ninja || cmake -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release \
	    -DPython_EXECUTABLE=$(PY) $(CONFIGURE) $(CMAKE_ARGS) > $(BUILD)/configure.log 2>&1 \
	    || { cat $(BUILD)/configure.log; rm -f $(BUILD)/build.ninja; exit 1; }
	@cmake --build $(BUILD)
	@grep -h -E "^-- (readers|moestream)" $(BUILD)/configure.log 2> /dev/null || true
	@CMAKE_ARGS="$(CONFIGURE) $(CMAKE_ARGS)" $(PY) -m pip install --quiet --no-build-isolation --no-deps \
	    --force-reinstall . -C build-dir=$(BUILD)
	@touch $@

format: env ## rewrite the sources in the one format
	@$(BIN)/clang-format -i $(C_FILES)
	@$(BIN)/ruff format $(PY_CODE)
	@$(BIN)/ruff check --fix $(PY_CODE)

check-format: env
	@echo "== format: clang-format and ruff format"
	@$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	@$(BIN)/ruff format --check $(PY_CODE)
	@$(PY) tools/check_text.py

check-lint: env
	@echo "== lint: ruff"
	@$(BIN)/ruff check $(PY_CODE)

check-types: build
	@echo "== types: mypy --strict"
	@$(BIN)/mypy

check-layers: env
	@echo "== layers: which room includes which"
	@$(PY) tools/check_layers.py --self-test
	@$(PY) tools/check_layers.py

check-symbols: build
	@echo "== symbols: what the libraries export"
	@$(PY) tools/check_symbols.py --lib-dir $(BUILD)/_lib

check-cdef: env
	@echo "== cdef: the committed declarations are those of moestream.h"
	@$(PY) tools/cdef.py --check

ctest: build
	@echo "== C tests"
	@cmake --build $(BUILD) --target ms_tests
	@ctest --test-dir $(BUILD) --no-tests=error

# Sanitizers: our code, the tests and ggml are compiled anew; libllama is the plain one, on the sanitized ggml.
define sanitized
	@echo "== C tests, $(1) sanitizer"
	@mkdir -p build/$(1)
	@cmake -S . -B build/$(1) -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMOESTREAM_SANITIZE=$(1) \
	    -DMOESTREAM_BUILD_TESTS=ON -DMOESTREAM_WERROR=ON -DPython_EXECUTABLE=$(PY) \
	    -DMOESTREAM_PREBUILT_LLAMA=$(CURDIR)/$(BUILD)/_lib/libllama.so $(CMAKE_ARGS) > build/$(1)/configure.log 2>&1 \
	    || { cat build/$(1)/configure.log; exit 1; }
	@cmake --build build/$(1) --target ms_tests
	@ctest --test-dir build/$(1) --no-tests=error
endef

ctest-address: build
	$(call sanitized,address)

ctest-thread: build
	$(call sanitized,thread)

# Not part of `make test`: needs clang (Debian: clang, libclang-rt-*-dev). What it finds goes into tests/fuzz/corpus.
fuzz: build ## libFuzzer on the expert index for FUZZ_SECONDS (600)
	@echo "== fuzz: the expert index, $(FUZZ_SECONDS) s (build/fuzz/corpus, build/fuzz/crash-*)"
	@mkdir -p build/fuzz/corpus
	@cmake -S . -B build/fuzz -G Ninja -DCMAKE_C_COMPILER=$(CLANG) -DCMAKE_CXX_COMPILER=$(CLANG:clang%=clang++%) \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMOESTREAM_SANITIZE=address -DMOESTREAM_FUZZ=ON -DMOESTREAM_BUILD_TESTS=ON \
	    -DPython_EXECUTABLE=$(PY) -DMOESTREAM_PREBUILT_LLAMA=$(CURDIR)/$(BUILD)/_lib/libllama.so > build/fuzz/configure.log \
	    2>&1 || { cat build/fuzz/configure.log; exit 1; }
	@cmake --build build/fuzz --target expert_index_fuzzer
	@cd build/fuzz && MOESTREAM_LIBLLAMA=$(CURDIR)/build/fuzz/_lib/libllama.so tests/expert_index_fuzzer corpus \
	    $(CURDIR)/tests/fuzz/corpus -max_total_time=$(FUZZ_SECONDS) -max_len=65536 -print_final_stats=1

archs: build ## upstream's test-llama-archs in build/dev/tools, which writes a small model of each architecture
	@cmake --build $(BUILD) --target ms_archs

clean: ## remove what was built; keep llama.cpp's source and .venv
	rm -rf build/dev build/address build/thread build/fuzz

distclean: clean ## remove .venv and the fetched llama.cpp as well
	rm -rf build .venv
