# One line a target; the work is in scripts/. ARGS is passed on: make load SHAPE=ramp ARGS="--drafter none"
.PHONY: up down test lint load bench check presets soak fuzz files clients suites train generate clean
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

up: ; @scripts/up $(ARGS)
down: ; @scripts/down
test: ; @scripts/test $(ARGS)
lint: ; @scripts/lint
load: ; @scripts/load $(if $(SHAPE),--shape $(SHAPE)) $(ARGS)
bench: ; @scripts/venv dev load && .venv/bin/python -m bench $(ARGS)
check: ; @scripts/check
presets: ; @scripts/e2e --release
soak: ; @scripts/venv dev && .venv/bin/python -m tests.soak $(ARGS)
fuzz: ; @scripts/venv dev && .venv/bin/python scripts/chat_model.py && .venv/bin/python -m tests.fuzz $(ARGS)
files: ; @scripts/venv dev && .venv/bin/python -m tests.files $(ARGS)
clients: ; @scripts/venv dev && .venv/bin/python -m tests.clients $(ARGS)
suites: ; @scripts/venv dev && .venv/bin/python -m tests.suites $(ARGS)
train: ; @scripts/venv train && .venv/bin/python -m training.train $(ARGS)
generate: ; @scripts/venv dev && .venv/bin/python scripts/generate.py $(ARGS)
clean: ; @scripts/clean
