"""Runs of a second on random English words, for the tests of every script."""

import random
from dataclasses import replace

import torch

from data.prepare import Prepare, prepare
from model import ModelConfig
from orders import OrderConfig
from runtime.processes import Processes
from training.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    OptimConfig,
    TrainConfig,
)

ALONE = Processes(0, 1, torch.device("cpu"))
LENGTH = 16  # the block size of tiny_config


def make_data(folder, words=4000, seed=0):
    """A prepared dataset of bytes: random English words, so that a small model has something to learn."""
    rng = random.Random(seed)
    vocabulary = [
        "any",
        "order",
        "model",
        "token",
        "mask",
        "block",
        "step",
        "learn",
        "the",
        "of",
        "predict",
    ]
    text = folder / "text.txt"
    text.write_text(" ".join(rng.choice(vocabulary) for _ in range(words)))
    return prepare(
        Prepare("text", source=(text,), tokenizer="bytes", val_fraction=0.2, out=folder / "data")
    )


def tiny_config(data, out, name="run", steps=40, **changes):
    """A run of a second. Dropout is on: its random numbers, too, must survive a resume."""
    config = Config(
        name=name,
        out=str(out),
        seed=7,
        model=ModelConfig(
            vocab_size=320, block_size=16, n_layer=2, n_head=2, n_embd=32, cond_dim=8, dropout=0.1
        ),
        order=OrderConfig("mixture", 0.25),
        data=DataConfig(str(data)),
        optim=OptimConfig(lr=3e-3, warmup_steps=5, ema_decay=0.9),
        train=TrainConfig(
            steps, batch_size=8, micro_batch_size=4, device="cpu", compile=False, log_interval=1
        ),
        eval=EvalConfig(interval=5, sequences=7),
        checkpoint=CheckpointConfig(interval=4, keep=2),
    )
    return change(config, **changes)


def change(config, **changes):
    """change(config, optim__lr=1.0) sets optim.lr."""
    for key, value in changes.items():
        table, _, name = key.rpartition("__")
        config = replace(
            config,
            **{table: replace(getattr(config, table), **{name: value})} if table else {name: value},
        )
    return config
