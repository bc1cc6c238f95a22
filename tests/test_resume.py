"""What a changed setting means, to a run that resumes and to one that starts from
weights."""

import copy
import dataclasses
import json
import os
import re
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers import (
    ALONE,
    ROOT,
    assert_same,
    change,
    flip_byte,
    make_data,
    metrics,
    newest,
    tiny_config,
)
from reference import TOKENS, make_system, random_tokens

import train
from aogpt.checkpoints import CheckpointError, load, store
from aogpt.data.loader import TokenDataset
from aogpt.model import ModelConfig
from aogpt.orders import OrderConfig
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import write_text
from aogpt.systems import build_model
from aogpt.training import config as configuration
from aogpt.training.checkpoint import check_same_run, known_best
from aogpt.training.config import StageConfig
from aogpt.training.initial_weights import check_same_tokenizer
from aogpt.training.warm_start import warm_start

REFUSED = "cannot change"
FREE = ""
ANEW = "best .* will be chosen again"
# What a run says of another value of a key beside the value, where it says more.
KEYS = {
    "seed": (8, ANEW),
    "model.dropout": (0.0, FREE),
    "order.kind": ("random", FREE),
    "objective.kind": ("groupwise", ANEW),
    "schedule": ((StageConfig(2, "random_blockwise"),), ANEW),
    "data.folder": (None, f"split train .*split val .*{ANEW}"),
    "data.end": ("given", REFUSED),
    "optim.kind": ("muon", REFUSED),
    "eval.sequences": (9, ANEW),
    "eval.draws": (9, ANEW),
}
MODEL = {"target": "input", "gelu": "tanh"}


def another(key, value):
    """Return another value of a key, and what a run says of it."""
    if key in KEYS:
        return KEYS[key]
    expected = REFUSED if key.startswith("model.") else FREE
    name = key.partition(".")[2]
    if isinstance(value, bool):
        return not value, expected
    if isinstance(value, int | float):
        return value + 1, expected
    return MODEL.get(name, "another"), expected


def all_keys():
    for field in dataclasses.fields(configuration.Config):
        value = getattr(configuration.Config(), field.name)
        inner = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        yield from [f"{field.name}.{key.name}" for key in inner] or [field.name]


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    config = tiny_config(data, tmp_path_factory.mktemp("finished"), steps=20)
    train.train(config, ALONE)
    return config, store.read_values(store.path_of(config.run_folder, 20))


@pytest.mark.parametrize("key", list(all_keys()))
def test_every_changed_key_is_printed_or_refused(finished, tmp_path, key):
    """A new key needs a row in the table of docs/training.md."""
    config, values = finished
    table, _, name = key.partition(".")
    owner = getattr(config, table) if name else config
    value, expected = another(key, getattr(owner, name or key))
    values = json.loads(json.dumps(values))
    said = []
    meta = values["data"]
    now = copy.deepcopy(config)
    if key == "data.folder":
        other = make_data(tmp_path, words=3000, seed=1)
        value = str(other)
        meta = json.loads((other / "meta.json").read_text())
    # past the checks of whole configurations
    owner = getattr(now, table) if name else now
    object.__setattr__(owner, name or key, value)
    documented = (
        (ROOT / "docs" / "training.md").read_text().partition("## A changed setting")[2]
    )
    assert any(f"`{name}`" in documented for name in (key, f"{table}.*", table))

    def say(*words):
        said.append(" ".join(map(str, words)))

    if expected == REFUSED:
        with pytest.raises(UserError, match=rf"{re.escape(key)} = .* {REFUSED}"):
            check_same_run(now, meta, "PATH", values, say)
        return
    check_same_run(now, meta, "PATH", values, say)
    path = store.path_of(config.run_folder, 20)
    best = known_best(now, meta, path, values, say)
    text = " ".join(said)
    assert f"{key} = " in text
    assert key == "schedule" or f"{key} = {value!r} (was" in text
    assert re.search(expected, text)
    assert (best is None) == (ANEW in expected)
    if expected == FREE:
        assert text.endswith(")") and len(said) == 1, text


def test_other_prompts_of_the_validation_records_choose_the_best_again(finished):
    """The tokens may be the same: which of them are predicted is of the roles."""
    config, values = finished
    values = json.loads(json.dumps(values))
    values["data"]["splits"]["val"]["roles"] = {"file": "roles.bin", "sha256": "1"}
    meta = json.loads(json.dumps(values["data"]))
    meta["splits"]["val"]["roles"]["sha256"] = "2"
    said = []
    check_same_run(config, meta, "PATH", values, said.append)
    assert "the split val" in said[0]
    path = store.path_of(config.run_folder, 20)
    assert known_best(config, meta, path, values, said.append) is None
    assert re.search(ANEW, said[-1])


@pytest.mark.parametrize("sizes", [(8, 32), (8, 4, 16, 8)])
def test_another_batch_size_neither_skips_nor_repeats_a_block_and_tokens_are_counted(
    data, tmp_path, monkeypatch, sizes
):
    config = tiny_config(data, tmp_path, steps=5, eval__interval=0)
    read = []
    blocks = TokenDataset.blocks

    def note(self, indices):
        read.extend(np.asarray(indices).tolist())
        return blocks(self, indices)

    monkeypatch.setattr(TokenDataset, "blocks", note)
    for part, size in enumerate(sizes):
        steps = 5 * (part + 1)
        train.train(change(config, train__batch_size=size, train__steps=steps), ALONE)
    total = 5 * sum(sizes)
    train_data = TokenDataset(data, "train", 16)
    expected = train_data.indices(7, 0, range(total), total).tolist()
    assert read == expected
    assert len(set(read)) == total < train_data.num_blocks
    assert newest(config)["sequences"] == total
    assert newest(config)["tokens"] == total * 16
    tokens = np.cumsum(np.repeat(sizes, 5)) * 16
    assert list(metrics(config, "tokens").values()) == tokens.tolist()


# ---- other weights -------------------------------------------------------------------

TINY = ModelConfig(
    vocab_size=320, block_size=16, n_layer=2, n_head=2, n_embd=32, cond_dim=8
)
ROTARY = {"position": "rotary", "target": "rotary"}
ENCODER = {"attention": "full", "target": "none", "mask_token": 257}
MEANINGS = {  # the source, what the model changes -> what is said; None: it starts
    "[MASK]": (ENCODER, {"mask_token": 300}, "set model.mask_token = 257 .it is 300.$"),
    "no target": (
        ROTARY,
        {"target": "none"},
        "set model.target = 'rotary' .it is 'none'.$",
    ),
    "target": (
        {"target": "input"},
        {"target": "shared"},
        "set model.target = 'input' .it is",
    ),
    "position": (
        {},
        {"position": "both"},
        "set model.position = 'learned' .it is 'both'.$",
    ),
    "longer": (
        {},
        {"block_size": 32},
        "have 16 positions; set model.block_size to at most that",
    ),
    "no noise": (ENCODER | {"noise": True}, {"noise": False}, "set model.noise = True"),
    "no bias": ({}, {"mlp_bias": False}, "set model.mlp_bias = True"),
    "longer without tables": (ROTARY, {"block_size": 32}, None),
    "shorter": ({}, {"block_size": 8}, None),
    "shorter tables in blocks": ({"target": "per_block"}, {"block_size": 8}, None),
    "shorter mask queries": ({"target": "mask_query"}, {"block_size": 8}, None),
    "plain": ({"target": "none"}, {"target": "adaln", "cond_dim": 16}, None),
    "two streams": (
        {"target": "none"},
        {"target": "two_stream", "group_attention": False},
        None,
    ),
    "noise": (ENCODER, {"noise": True}, None),
    "no meaning": ({}, {"dropout": 0.5, "position_init": "sinusoidal"}, None),
    "bias": (
        {"mlp_bias": False, "head_bias": False},
        {"mlp_bias": True, "head_bias": True},
        None,
    ),
}


@pytest.mark.parametrize("case", MEANINGS)
def test_weights_start_a_model_only_where_they_mean_the_same(case):
    theirs, changes, expected = MEANINGS[case]
    source = build_model(dataclasses.replace(TINY, **theirs))
    model = build_model(dataclasses.replace(source.config, **changes))
    if expected:
        with pytest.raises(CheckpointError, match=expected):
            warm_start(model, source)
        return
    warm_start(model, source)
    ours = dict(model.named_parameters())
    for name, weight in source.named_parameters():
        assert torch.equal(ours[name], weight[: len(ours[name])]), name


PLAIN = [  # a plain GPT, its settings
    ("GPT-2", {}),
    ("GPT-2", {"position": "both"}),
    ("Llama, plain", {}),
    ("Llama, plain", {"start": "attended"}),
]


@pytest.mark.parametrize("system, settings", PLAIN)
@pytest.mark.parametrize(
    "target", ["none", "adaln", "rotary", "two_stream", "mask_query"]
)
@torch.no_grad()
def test_a_plain_gpt_starts_a_decoder_that_computes_it_left_to_right(
    system, settings, target
):
    """Its contents do, where queries are inputs of their own; without [None] these are
    a plain GPT's inputs after it."""
    source = make_system(system, 1, **settings)
    has_none = source.config.start == "attended"
    if target == "rotary" and source.config.position != "rotary":
        return
    if target == "mask_query" and has_none:
        return
    config = dataclasses.replace(source.config, target=target, block_size=8)
    if target == "mask_query":
        config = dataclasses.replace(config, start="attended")
    elif config.position != "learned":
        config = dataclasses.replace(config, query_at="before_target")
    model = build_model(config).double().eval()
    warm_start(model, source)
    tokens = random_tokens(TOKENS, batch_size=2, length=8, seed=0)
    order = torch.arange(8).expand(2, 8)
    block = 0 if target == "mask_query" else -1  # its last one computes queries alone
    states = []
    logits = []
    for each in (model, source):
        each.blocks[block].register_forward_hook(
            lambda block, inputs, out: states.append(out[0])
        )
        logits.append(each.head_logits(each.hidden(tokens, order)))
    ours, theirs = logits
    if target == "two_stream":
        ours, theirs = states
    elif target == "mask_query":
        ours = states[0][:, :7]
        theirs = states[1][:, 1:]
    assert (ours - theirs).abs().max() < 1e-12
    has_own_queries = target in ("two_stream", "mask_query")
    assert ((logits[0] - logits[1]).abs().max() > 0.1) == has_own_queries
    if target == "adaln":  # only the modulation has to move for it to know its targets
        assert model.wtpe.weight.std() > 0
        assert model.blocks[0].adaln.weight.abs().max() == 0
    if target != "none":  # the same weights in another order
        assert model(tokens, order.flip(1)).isfinite().all()


@pytest.mark.parametrize(
    "system, position", [("GPT-2", "learned"), ("Llama, plain", "rotary")]
)
def test_an_encoder_starts_from_a_decoder(system, position):
    """The vector of [MASK] is the mean of those of the tokens; an encoder has no
    [None], which has the first position of a GPT-2."""
    source = make_system(system, 1)
    V = source.config.vocab_size
    config = dataclasses.replace(
        source.config,
        attention="full",
        target="none",
        position=position,
        query_at="target",
        start="attended",
        vocab_size=V + 1,
        mask_token=V,
        block_size=8,
    )
    encoder = build_model(config).double()
    warm_start(encoder, source)
    tokens = source.wte.weight
    assert torch.equal(encoder.wte.weight[:V], tokens)
    assert torch.equal(encoder.wte.weight[V], tokens.mean(dim=0))
    assert torch.equal(encoder.blocks[1].mlp.fc.weight, source.blocks[1].mlp.fc.weight)
    if position == "learned":
        assert torch.equal(encoder.wpe.weight, source.wpe.weight[1:9])


@pytest.mark.parametrize(
    "theirs, ours, words",
    [
        # another name of the same vocabulary
        ({}, {"tokenizer": "words"}, None),
        (
            {},
            {"tokenizer": "words", "tokenizer_sha256": None},
            "tokenizer is 'bytes', that of .* is 'words'; prepare",
        ),
        (
            {"tokenizer_sha256": "a"},
            {"tokenizer_sha256": "b"},
            "sha256 is 'a', that of .* is 'b'",
        ),
        # of an older version
        ({"tokenizer_sha256": None}, {"tokenizer_sha256": "b"}, None),
        ({}, {"vocab_size": 258}, "its vocab_size is 257, that of .* is 258"),
    ],
)
def test_another_tokenizer_is_refused_by_name_vocabulary_and_size(
    run, data, theirs, ours, words
):
    source = load(run)
    for key, value in theirs.items():
        object.__setattr__(source, key, value)
    meta = json.loads((data / "meta.json").read_text()) | ours
    expected = pytest.raises(UserError, match=words) if words else nullcontext()
    with expected:
        check_same_tokenizer(tiny_config(data, ""), source, meta)


def test_no_run_starts_from_a_model_of_another_tokenizer(run, data, tmp_path):
    folder = shutil.copytree(data, tmp_path / "data")
    meta = json.loads((data / "meta.json").read_text()) | {"tokenizer": "words"}
    del meta["tokenizer_sha256"]
    (folder / "meta.json").write_text(json.dumps(meta))
    config = tiny_config(folder, tmp_path, train__init_from=str(run))
    with pytest.raises(UserError, match="cannot start from .*: its tokenizer is"):
        train.train(config, ALONE)


def test_a_source_is_read_until_the_run_has_a_checkpoint(run, tmp_path):
    """After that its folder may be gone."""
    config = tiny_config("", tmp_path, train__init_from=str(run))
    wide = change(config, model__n_embd=64)
    write_text(config.run_folder / "config.toml", configuration.to_toml(wide))
    assert configuration.with_source(config, set()).model.n_embd == 32
    store.path_of(config.run_folder, 1).mkdir(parents=True)
    assert configuration.with_source(config, set()).model.n_embd == 64


@pytest.mark.parametrize("file", ["train.bin", "val.bin"])
def test_data_that_changed_between_two_starts_is_refused_and_touched_data_is_not(
    tmp_path, data, file
):
    """The size stays the same; times that change cost no more than a checksum."""
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    config = tiny_config(folder, tmp_path, steps=6)
    train.train(config, ALONE)
    more = change(config, train__steps=8)
    os.utime(folder / file)
    train.train(more, ALONE)
    times = (folder / file).stat()
    flip_byte(folder / file, at=4, mask=1)
    os.utime(folder / file, ns=(times.st_atime_ns, times.st_mtime_ns))
    before = newest(config)
    with pytest.raises(UserError, match=f"{file} has changed since the run last"):
        train.train(change(config, train__steps=10), ALONE)
    assert_same(newest(config), before)


def test_another_file_of_orders_is_told_and_forgets_the_best(tmp_path, data, capsys):
    orders = tmp_path / "orders.npy"
    block_size = tiny_config(data, tmp_path).model.block_size
    np.save(orders, np.arange(block_size)[None])
    config = tiny_config(data, tmp_path, steps=6)
    config = change(config, order=OrderConfig("file", file=str(orders)))
    train.train(config, ALONE)
    train.train(change(config, train__steps=7), ALONE)
    assert "other data" not in capsys.readouterr().out
    np.save(orders, np.arange(block_size)[None, ::-1])
    train.train(change(config, train__steps=8), ALONE)
    note = f"{orders} holds other data than when the run last started"
    said = capsys.readouterr().out
    assert note in said
    assert re.search(ANEW, said)
    with pytest.raises(UserError, match="order.file .*nowhere.npy cannot be read"):
        other = OrderConfig("file", file=str(tmp_path / "nowhere.npy"))
        train.train(change(config, order=other), ALONE)
