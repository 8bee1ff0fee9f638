# Two commands do everything on a fresh machine with a Python from 3.11 to 3.14: `make demo` and `make test`.
# PYTHON=… takes a certain one; where .venv is of another version, it is made anew.
ifndef PYTHON
PYTHON := $(shell for python in .venv/bin/python python3.11 python3.12 python3.13 python3.14 python3; do \
  $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && echo $$python && break; done)
endif
VERSION := $(shell $(or $(PYTHON),false) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
BIN := .venv/bin
# Compiled by all cores afterwards, instead of by one.
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
COMPILE := $(BIN)/python -m compileall -qq -j 0 .venv/lib || true  # some packages ship files for other Pythons
# PyTorch for processors alone is 4.5 GB smaller; CPU_WHEELS= is for machines that install for others with a GPU.
CPU_WHEELS ?= https://download.pytorch.org/whl/cpu
WHEELS ?= .[mpi,flare,dossier,view]
OFFLINE := env -u PIP_FIND_LINKS -u PIP_INDEX_URL -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
.DEFAULT_GOAL := help

help:            ## what there is to make
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/' | expand -t 18

env: .venv/.ready-$(VERSION)  ## the environment with all extras, in .venv
.venv/.ready-$(VERSION): .venv/.demo-$(VERSION)
	$(PIP_INSTALL) -c constraints.txt -e '.[mpi,flare,dossier,synthesis,export,formats,czi,isyntax,view,dev]'
	@$(COMPILE)
	@touch $@

.venv/.demo-$(VERSION): pyproject.toml constraints.txt
	$(if $(VERSION),,$(error no Python from 3.11 to 3.14 was found; give it as PYTHON=/path/to/python))
	test -x .venv/bin/pip -a -d .venv/lib/python$(VERSION) || $(PYTHON) -m venv --clear .venv
	@if [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null && $(BIN)/python -c \
	  'from urllib.request import urlopen; urlopen("$(CPU_WHEELS)/torch/", timeout=5)' 2>/dev/null; then \
	  echo 'no NVIDIA GPU here: PyTorch from $(CPU_WHEELS)'; \
	  $(PIP_INSTALL) --no-deps --index-url $(CPU_WHEELS) $$(grep -E '^torch(vision)?==' constraints.txt); fi
	$(PIP_INSTALL) -c constraints.txt -e '.[mpi]'
	@$(COMPILE)
	@touch $@

demo: .venv/.demo-$(VERSION)  ## four hospitals' slides → patches → each alone, all together on MPI ranks → who should join
	$(BIN)/wsi-fl demo --out demo

federation-demo: .venv/.flare-$(VERSION)  ## a server and four hospitals as processes: kits, a signed plan, NVIDIA FLARE, scores of all
	$(BIN)/wsi-fl federation demo --out federation-demo
.venv/.flare-$(VERSION): .venv/.demo-$(VERSION)
	$(PIP_INSTALL) -c constraints.txt -e '.[flare]'
	@touch $@

# Without compiled files every process of a test would compile the package anew.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope

EXTENSIONS := tests/extensions wsi_fl/evidence wsi_fl/hospitals wsi_fl/oneshot wsi_fl/synthesis wsi_fl/viewer

# The third of the workers has a core while another waits for processes.
test: env        ## the test suite of the core: offline, two cores, real MPI ranks included
	$(PYTEST) -n 3 --no-loadscope-reorder --durations=30 --ignore=tests/nightly $(EXTENSIONS:%=--ignore=%)

test-extensions: env  ## the test suite of the extensions: hospitals, one-shot, evidence, generators, viewer
	$(PYTEST) --no-loadscope-reorder --durations=30 $(EXTENSIONS)

test-hospitals: env  ## the slow tests between hospitals: every method, every fault, over NVIDIA FLARE and a folder
	$(PYTEST) -m slow --durations=20 --deselect 'tests/extensions/test_hostile_aggregation_peers.py::test_restarts_of_a_lying_peer_cost_no_more_than_was_approved[20]' tests/nightly/test_methods_between_hospitals.py tests/nightly/test_flare_faults.py tests/extensions/test_folder_transport.py tests/extensions/test_federation_demo.py tests/extensions/test_hostile_aggregation_peers.py

test-nightly: env  ## all slow tests: between hospitals, torture, fuzz, kills, walks over budgets, every case of what `test` asks of one
	$(PYTEST) --no-loadscope-reorder -m slow --durations=30

check: env       ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/.docs-$(VERSION)  ## the documentation as HTML, in docs/_build
	$(BIN)/python -c "from pathlib import Path; from wsi_fl.study.reference import render_reference_page; Path('docs/reference/configuration.md').write_text(render_reference_page(), 'utf-8')"
	$(BIN)/python docs/draw_architecture.py
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo docs/_build/html/index.html
.venv/.docs-$(VERSION): .venv/.ready-$(VERSION)
	$(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@

bench: env       ## measure; ratios within one run
	for name in tiling dp_step transport communication; do $(BIN)/python benchmarks/$$name.py; done

wheelhouse:      ## all wheels for a hospital without internet, and an installation from them alone
	rm -rf wheelhouse
	$(PYTHON) -m venv --clear build/wheelhouse
	build/wheelhouse/bin/pip wheel --disable-pip-version-check --wheel-dir wheelhouse -c constraints.txt '$(WHEELS)'
	cd wheelhouse && sha256sum *.whl > SHA256SUMS
	@echo "trial installation from wheelhouse/ alone, some minutes without a word"
	$(PYTHON) -m venv --clear build/wheelhouse
	$(OFFLINE) build/wheelhouse/bin/pip install --quiet --no-index --find-links wheelhouse $(WHEELS:.%='wsi-fl%')
	$(if $(filter .%,$(WHEELS)),build/wheelhouse/bin/wsi-fl --version)
	rm -rf build/wheelhouse

clean:           ## remove the environment, the demos and the wheels
	rm -rf .venv demo federation-demo docs/_build wheelhouse

.PHONY: help env demo federation-demo test test-extensions test-hospitals test-nightly check docs bench wheelhouse clean

release: env     ## wheel, sdist, list of all software, its known vulnerabilities and checksums, in dist
	rm -rf dist
	$(PYTHON) -m venv --clear build/release
	build/release/bin/pip install --quiet --disable-pip-version-check build pip-audit cyclonedx-bom
	build/release/bin/python -m build --outdir dist .
	build/release/bin/cyclonedx-py environment --of JSON -o dist/sbom.json $(BIN)/python
	build/release/bin/pip-audit --no-deps --disable-pip -r constraints.txt -f json -o dist/vulnerabilities.json
	! grep -q skip_reason dist/vulnerabilities.json || echo "some packages could not be looked up: see dist/vulnerabilities.json"
	cd dist && sha256sum * > SHA256SUMS
	rm -rf build/release
