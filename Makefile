# make quickstart: from a bare clone to a trained, evaluated and sampled model.
# make test:       from a bare clone to lint and all tests.
# Both create .venv and install pinned requirements; run again, they install nothing twice.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
RUN := out/quickstart
# One thread: tensors as small as the quickstart's gain nothing from a second one.
quickstart: export OMP_NUM_THREADS ?= 1

.PHONY: quickstart test lint clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/.requirements
	@echo "== 1/5 data: the documentation of this Python installation, bytes as tokens"
	$(PY) data/prepare.py pydocs
	@echo "== 2/5 training: a small AO-GPT, 90% random and 10% left-to-right orders"
	$(PY) train.py configs/quickstart.toml
	@echo "== 3/5 evaluation: perplexity left to right and in any order"
	$(PY) eval_ppl.py $(RUN) --datasets pydocs --num-orders 2
	@echo "== 4/5 sampling in random order, one token a step on average"
	$(PY) sample.py $(RUN) --mode mdm --steps 64 --num-samples 2 --top-p 0.9
	@echo "== 5/5 sampling left to right, with a prompt"
	$(PY) sample.py $(RUN) --mode l2r --num-samples 2 --top-p 0.9 --prompt "Return the "
	@echo "== done. The loss curve is $(RUN)/loss.png. Try next:"
	@echo "   source $(VENV)/bin/activate"
	@echo "   python sample.py $(RUN) --mode even --steps 16 --temperature 0.8   # fewer, larger steps"
	@echo "   python train.py configs/quickstart.toml --name longer --train.steps 30000"
	@echo "   python data/prepare.py text --source MY.txt --out data/own --tokenizer bytes   # your own text:"
	@echo "   python train.py configs/quickstart.toml --name own --data.folder data/own"

test: $(VENV)/.requirements-dev lint
	$(PY) -m pytest

lint: $(VENV)/.requirements-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

$(VENV)/.requirements: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; run: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -r requirements.txt
	@touch $@

$(VENV)/.requirements-dev: requirements-dev.txt $(VENV)/.requirements
	$(PY) -m pip install --quiet -r requirements-dev.txt
	@touch $@

clean:
	rm -rf $(VENV)
