# make quickstart: from a bare clone to a trained, evaluated and sampled model.
# make test:       from a bare clone to lint and the tests, without those marked as slow.
# make test-all:   the same with all tests, also those of extras and studies.
# make test-studies: the tests of extras and studies, which make test leaves out, without those marked as slow.
# make types:      mypy on the model, orders, objectives, scoring, systems, sampling, training and train.py.
# make eval-smoke: every evaluation on the quickstart's model, a small encoder and real text, from the folder that
#                  AOGPT_DATA names.
# make docs:       the site of README, docs, results and docstrings, in site/ (mkdocs.yml); its own .venv-docs.
# make playground: a page in the browser on which the books model fills in your text.
# make gpu:        is everything right on this GPU? docs/gpu.md
# make reproduce: the paper's zero-shot tables from released weights, downloaded (OPTIONS=--quick for a part of each set: hours).
# make molecules:  the benchmark of molecules MOSES: its data (52 MB, WHEEL=FILE for a local copy), and results/molecules_model
#                  measured on it, half an hour.
# make golden:     do the debug configs have the losses of tests/golden.json? OPTIONS=--record records them on this machine.
# make soak:       jobs of several processes that are killed, stopped and hung, a quarter of an hour: results/soak.details.md.
# make fuzz:       malformed files and options, an hour: studies/fuzz.py.
# All install pinned requirements and this package into .venv (requirements/install.py), which they create unless it
# exists; run again, they install nothing twice. CPU_INDEX=URL is a mirror of PyTorch's index of CPU builds.

PYTHON ?= python3
VENV := .venv
DOCS_VENV := .venv-docs
PY := $(VENV)/bin/python
BASE := $(if $(wildcard $(PY)),$(PY),$(PYTHON))
INSTALL := $(BASE) requirements/install.py $(if $(CPU_INDEX),--cpu-index $(CPU_INDEX))
RUN := out/quickstart
SMOKE := out/eval_smoke
WHEEL ?= out/molsets-0.3.1-py3-none-any.whl
SMALL := --tokenizer english --block-size 128
CHOICE := --temperature 0.7 --top-p 0.9
eval-smoke soak fuzz playground molecules: export OMP_NUM_THREADS ?= 1

.PHONY: quickstart quickstart-steps test test-all test-studies lint types docs eval-smoke playground gpu golden reproduce molecules soak fuzz clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/.requirements
	@export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$($(PY) requirements/threads.py)}; \
		$(MAKE) --no-print-directory quickstart-steps

quickstart-steps:
	@echo "== 1/5 data: nine children's books, in tokens of a small vocabulary"
	$(PY) data/prepare.py stories
	@echo "== 2/5 training: a small AO-GPT, 80% random and 20% left-to-right orders; two to five minutes"
	$(PY) train.py configs/quickstart.toml
	@echo "== 3/5 evaluation: left to right and in any order"
	$(PY) eval_ppl.py $(RUN) --datasets stories --num-orders 2
	@echo "   To compare (bits/byte): 1.99 left to right and 2.11 in random orders on our machine. A random order is harder."
	@echo "== 4/5 a text continued left to right, then a gap between given text filled, the most confident positions first"
	$(PY) sample.py $(RUN) --mode l2r --num-samples 2 $(CHOICE) --prompt "Dorothy looked at the" --length 48
	$(PY) sample.py $(RUN) --mode confidence --num-samples 3 $(CHOICE) \
		--prompt "The old horse was tired,[MASK:12] and so they gave him some water." --html $(RUN)/samples.html --overwrite
	@echo "== 5/5 a picture of the losses"
	$(PY) -m studies.plot $(RUN) --out $(RUN)/loss.png --overwrite
	@echo "== done. The gap fills in, step by step, at file://$(CURDIR)/$(RUN)/samples.html#play; the losses are in $(RUN)/loss.png."
	@echo "   Next, with a larger model that comes along:"
	@echo "   source $(VENV)/bin/activate; python -m aogpt blanks results/books_model \"The[MASK] smiled at her children.\""

test: $(VENV)/.requirements-dev lint
	$(PY) -m pytest -m "not slow"

test-all: $(VENV)/.requirements-dev lint
	$(PY) -m pytest tests extras/tests studies/tests

test-studies: $(VENV)/.requirements-dev
	$(PY) -m pytest -m "not slow" extras/tests studies/tests

lint: $(VENV)/.requirements-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PYTHONPATH=. $(VENV)/bin/lint-imports
	$(PY) tests/check_words.py

# A minute at first, then seconds.
types: $(VENV)/.requirements-dev
	$(PY) -m mypy

# Not --quiet, which keeps --strict from seeing warnings. The variable silences an advertisement of the theme.
docs: $(DOCS_VENV)/.requirements
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo "open site/index.html"

playground: $(VENV)/.requirements-playground
	$(PY) -m extras.playground.app

gpu: $(VENV)/.requirements-dev
	$(PY) -m pytest -m gpu --numprocesses=1

golden: $(VENV)/.requirements-dev
	PYTHONPATH=. $(PY) tests/golden.py $(OPTIONS)

reproduce: $(VENV)/.requirements
	$(PY) -m studies.reproduce $(OPTIONS)

molecules: $(VENV)/.requirements-dev $(WHEEL)
	test -f data/molecules/meta.json || $(PY) -m studies.molecules prepare --wheel $(WHEEL)
	@test -d results/molecules_model || { echo "There is no trained model yet. Train one: $(PY) -m studies.molecules train"; exit 2; }
	$(PY) -m studies.molecules measure results/molecules_model --wheel $(WHEEL) --out out/molecules.jsonl

out/molsets-0.3.1-py3-none-any.whl:
	$(PYTHON) -m pip download --no-deps --dest out molsets==0.3.1

soak: $(VENV)/.requirements-dev
	PYTHONPATH=tests $(PY) -m studies.soak

fuzz: $(VENV)/.requirements-dev
	PYTHONPATH=tests $(PY) -m studies.fuzz --cases 4000

eval-smoke: $(VENV)/.requirements-dev
	@test -n "$(AOGPT_DATA)" || { echo "set AOGPT_DATA to a folder with ptb/, lambada/ and wikitext/"; exit 2; }
	test -f data/stories/meta.json || $(PY) data/prepare.py stories
	test -f $(RUN)/best || $(PY) train.py configs/quickstart.toml
	@mkdir -p $(SMOKE)
	@echo "== 1/8 data: three evaluation sets in the packing of the SEDD protocol, in blocks of this model"
	$(PY) data/prepare.py ptb --source $(AOGPT_DATA)/ptb/ptb.test.txt $(SMALL) --out $(SMOKE)/ptb
	$(PY) data/prepare.py lambada --source $(AOGPT_DATA)/lambada/lambada_test.jsonl $(SMALL) --out $(SMOKE)/lambada
	$(PY) data/prepare.py wikitext103 --source $(AOGPT_DATA)/wikitext/wiki.test.tokens $(SMALL) --out $(SMOKE)/wikitext103
	@echo "== 2/8 perplexity: data sets x orders x ensembles, 8 orders each"
	$(PY) eval_ppl.py $(RUN) --datasets $(SMOKE)/ptb $(SMOKE)/lambada $(SMOKE)/wikitext103 --orders l2r random \
		--ensemble 1 8 --num-orders 8 --max-sequences 256 --json $(SMOKE)/ppl.json --overwrite
	@echo "== 3/8 two processes give the numbers of one"
	$(PY) -m torch.distributed.run --standalone --nproc_per_node=2 eval_ppl.py $(RUN) --datasets $(SMOKE)/ptb \
		--orders random --ensemble 1 4 --max-sequences 8 --json $(SMOKE)/two.json --overwrite
	$(PY) eval_ppl.py $(RUN) --datasets $(SMOKE)/ptb --orders random --ensemble 1 4 --max-sequences 8
	@echo "== 4/8 bfloat16"
	$(PY) eval_ppl.py $(RUN) --datasets $(SMOKE)/ptb --max-sequences 64 --dtype bfloat16 --json $(SMOKE)/bfloat16.json --overwrite
	@echo "== 5/8 an encoder, trained for 300 steps: its ELBO"
	$(PY) train.py configs/debug/encoder.toml --name encoder --out $(SMOKE) --train.steps 300 \
		--data.folder data/stories --model.block-size 128 --model.vocab-size 2112 --model.mask-token 2048
	$(PY) eval_ppl.py $(SMOKE)/encoder --datasets $(SMOKE)/ptb $(SMOKE)/lambada --num-orders 8 --max-sequences 256 \
		--json $(SMOKE)/elbo.json --overwrite
	@echo "== 6/8 samples of sample.py"
	$(PY) sample.py $(RUN) --mode l2r --num-samples 8 --top-p 0.95 --jsonl $(SMOKE)/samples.jsonl --overwrite
	@echo "== 7/8 those and samples of both models, judged by the decoder"
	$(PY) eval_gen.py $(RUN) $(SMOKE)/encoder $(SMOKE)/samples.jsonl --judge $(RUN) --mode mdm:steps=8 mdm:steps=64 \
		--temperature 0.9 --top-p 0.95 --num-samples 32 --json $(SMOKE)/gen.json --overwrite
	@echo "== 8/8 lm-evaluation-harness: the last words of LAMBADA, left to right, in any order and generated"
	@for task in file word; do sed 's|@FILE@|$(AOGPT_DATA)/lambada/lambada_test.jsonl|' \
		studies/configs/tasks/lambada_$$task.yaml > $(SMOKE)/lambada_$$task.yaml || exit; done
	$(PY) -m extras.harness $(RUN) --tasks $(SMOKE)/lambada_file.yaml $(SMOKE)/lambada_word.yaml --limit 200 \
		--json $(SMOKE)/tasks.json --overwrite
	$(PY) -m extras.harness $(SMOKE)/encoder --tasks $(SMOKE)/lambada_file.yaml --limit 200
	$(PY) -m extras.harness $(RUN) --tasks $(SMOKE)/lambada_file.yaml --limit 200 --order random
	@echo "== done: tables are in $(SMOKE)"

$(VENV)/.requirements: requirements.txt pyproject.toml
	@$(BASE) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; run: make PYTHON=python3.11 $(MAKECMDGOALS), or first: uv venv --python 3.12")'
	@$(INSTALL) requirements.txt --editable .
	@touch $@

$(VENV)/.requirements-dev: requirements-dev.txt requirements/harness.txt $(VENV)/.requirements
	@$(INSTALL) requirements-dev.txt
	@touch $@

$(VENV)/.requirements-playground: requirements/playground.txt $(VENV)/.requirements
	@$(INSTALL) requirements/playground.txt
	@touch $@

$(DOCS_VENV)/.requirements: requirements/docs.txt
	@$(INSTALL) requirements/docs.txt --environment $(DOCS_VENV)
	@touch $@

clean:
	rm -rf $(VENV) $(DOCS_VENV) site
