# make demo      generate one clip with stock diffusers and one with the fast path, compare, time, save
# make test      every test that needs no GPU
# make gpu-test  the tests that need CUDA, with the torch and diffusers that $(PYTHON) already has
# make bench     the benchmark (needs CUDA); ARGS="--help" for its options
# make results   write the tables and the picture in docs and examples/results from the files there
# make notebooks run the notebooks and keep their outputs
# make lint      ruff and mypy
#
# All but gpu-test need only python3 (3.10 or newer): they make .venv once, from constraints.txt. To use an environment that is
# there, as it is, with the packages that it has: make test ENVIRONMENT=/path/to/environment

# A command on the PATH, or an absolute path.
PYTHON ?= python3
ARGS ?=
ENVIRONMENT :=
VENV := $(or $(ENVIRONMENT),.venv)
INSTALLED := $(if $(ENVIRONMENT),,.venv/installed)

.PHONY: demo test gpu-test bench results notebooks lint

demo: $(INSTALLED)
	$(VENV)/bin/python examples/demo.py $(ARGS)

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest --ignore=tests/gpu --cov=patches --cov=ltx2_fastpath -n auto --dist worksteal $(ARGS)

bench: $(INSTALLED)
	$(VENV)/bin/python -m ltx2_fastpath.bench $(ARGS)

results: $(INSTALLED)
	$(VENV)/bin/python examples/results_table.py

notebooks: $(INSTALLED)
	$(VENV)/bin/jupyter execute --inplace examples/notebooks/*.ipynb

# mypy sees the package as it is installed: with patches inside.
lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	rm -rf build/types && mkdir -p build/types
	cp -r ltx2_fastpath build/types/ && cp -r patches build/types/ltx2_fastpath/
	cd build/types && $(abspath $(VENV))/bin/mypy --config-file $(CURDIR)/setup.cfg

# From tests/, because python -m pytest puts the current directory first on the path, and the checkout itself, unlike an
# installed copy, has no ltx2_fastpath.patches.
gpu-test:
	rm -rf .gpu-site build
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --target .gpu-site .
	cd tests && PYTHONPATH="$(CURDIR)/.gpu-site$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m pytest gpu $(ARGS)

.venv/installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[test,examples,bench]"
	touch $@
