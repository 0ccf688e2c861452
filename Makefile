# SPDX-License-Identifier: Apache-2.0
# Espalier. `make demo` and `make test` each do all set-up first; a second run repeats no work.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup build command complete test wheels test-machines test-machines-short core-test cuda asan asan-train tsan fuzz lint lint-fast format demo demo-tiny demo-rl examples docs clean

# Some container images set it. Every Python process of a test would then compile PyTorch's modules again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON = $(shell scripts/setup.sh --print-python)
TEST_JOBS ?= $(shell nproc)

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## system packages, and .venv unless an active environment has torch >= 2.9
	@scripts/setup.sh

build: setup  ## the command bin/espalier and the tests
	@scripts/build.sh release

# An active environment has what its user put into it.
complete: setup
	@scripts/setup.sh --complete

# Python tests wait for processes a tenth of their time: there is one worker more than cores.
test: complete build  ## all tests: C++, layers, documents, Python
	@python3 tests/check_layers.py --self-test
	@python3 tests/check_types.py --self-test
	@python3 tests/check_docs.py --self-test
	@OMP_NUM_THREADS=1 ctest --preset release --parallel $(TEST_JOBS)
	@PYTHONPATH=python $(PYTHON) -m pytest -q --durations 20 --numprocesses $$(($(TEST_JOBS) + 1)) --dist loadfile --no-loadscope-reorder tests/python

wheels: setup  ## the wheels of espalier-train and espalier-torch in dist/, built and tested in clean environments
	@scripts/wheels.sh

test-machines: build  ## the C++ tests as other machines would run them: CPU levels, threads, seeds, load (about an hour)
	@scripts/test_machines.sh

test-machines-short: build  ## the numeric tests as a machine with AVX2 would run them (a minute or two)
	@scripts/test_machines.sh --short

core-test:  ## build and test the LibTorch-free half alone (under a minute)
	@scripts/setup.sh --core
	@scripts/build.sh core
	@ctest --preset core --parallel $(TEST_JOBS)

cuda: setup  ## compile the CUDA kernels (needs nvcc), check their machine code, and run their tests where there is a GPU
	@ESPALIER_CUDA=ON scripts/build.sh release espalier_ops cuda_tests
	@ctest --preset release --label-regex cuda

asan:  ## the same by clang, under address and undefined-behaviour sanitizers
	@scripts/setup.sh --clang
	@scripts/build.sh asan
	@ctest --preset asan --parallel $(TEST_JOBS)

asan-train: complete  ## long runs and failures of the command, with LibTorch, under the same sanitizers (half an hour, most of it to compile)
	@scripts/build.sh asan-train espalier
	@ESPALIER_PROGRAM=$(CURDIR)/build/asan-train/bin/espalier ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=1 \
	  PYTHONPATH=python $(PYTHON) -m pytest -q --numprocesses $(TEST_JOBS) tests/python/test_long_runs.py tests/python/test_faults.py \
	  tests/python/test_failing_calls.py --deselect tests/python/test_long_runs.py::test_what_a_run_cannot_follow_is_refused

tsan:  ## the CPU kernels whose threads synchronise by atomics, under the thread sanitizer
	@scripts/setup.sh --clang
	@scripts/build.sh tsan thread_tests
	@ctest --preset tsan

fuzz:  ## every parser on mutated inputs, a minute in all
	@scripts/setup.sh --clang
	@scripts/build.sh asan fuzz_targets
	@scripts/fuzz.sh

lint: complete  ## formatting, ruff, mypy, layers, documents, and clang-tidy on the LibTorch-free half
	@scripts/lint.sh

lint-fast: complete  ## the same without clang-tidy (a minute)
	@scripts/lint.sh --fast

format: complete  ## clang-format all sources in place
	@scripts/lint.sh --format

command: setup
	@scripts/build.sh release espalier

demo: complete command  ## prepare, inspect, verify, train and bench on real conversations (about 10 minutes on two fast cores the first time, 4 of them compiling)
	@scripts/demo.sh

demo-tiny: complete command  ## the same with a small random model (under two minutes once built)
	@scripts/demo.sh --tiny

demo-rl: complete  ## an agent that learns from its own rollouts, on trees and with packing (a minute or two)
	@scripts/build.sh release espalier_python espalier_python_engine_module
	@PYTHONPATH=python $(PYTHON) examples/desk_rl/train.py --out runs/demo-rl/curve.jsonl
	@$(PYTHON) examples/desk_rl/curve.py runs/demo-rl/curve.jsonl -o runs/demo-rl/curve.svg

EXAMPLES = trl_sft trl_dpo trl_grpo peft_lora traces_to_checkpoint

examples: complete command  ## every program of examples/, with its measured gain (some minutes; needs trl and peft)
	@for example in $(EXAMPLES); do \
	  PYTHONPATH=python $(PYTHON) examples/$$example.py || exit 1; \
	done

docs: complete command  ## the site of docs/ in build/site; dead links are errors (scripts/docs.sh --serve shows it)
	@scripts/docs.sh

clean:  ## remove what was built (not .venv, data or runs)
	rm -rf build bin
