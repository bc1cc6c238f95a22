"""Prompts come first and bear no loss, and padding is not there."""

import collections
import itertools
import types
from functools import partial

import numpy as np
import pytest
import torch
from helpers import ALONE, metrics, of_system, prepared, tiny_config, write_rows
from hypothesis import given
from hypothesis import strategies as st
from reference import TOKENS, accept, make_system, random_orders, random_tokens

import train
from aogpt.data.loader import TokenDataset, load_meta
from aogpt.data.prompts import (
    PADDING,
    PREDICTED,
    PROMPT,
    as_prompt,
    encode_example,
    spans,
)
from aogpt.data.tokenizers import get_tokenizer
from aogpt.evaluation.likelihood import token_nll
from aogpt.objectives import ObjectiveConfig, evaluation_masks, masks_at
from aogpt.orders import OrderConfig, Roles, orders_at
from aogpt.runtime.errors import UserError
from aogpt.runtime.randomness import SCORED_ORDERS
from aogpt.scoring import group_starts, masked_log_probs, token_log_probs
from aogpt.training.batches import make_batch, roles_of
from aogpt.training.config import Config, TrainConfig

ROLES = torch.tensor(
    [[1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 2, 2], [0, 0, 0, 2, 2, 2], [0] * 6]
)
LENGTHS = [6, 4, 3, 6]


def rows_of(tokens, order):
    """Each record alone, without what is absent, and the part of its order that it
    has."""
    for row, length in enumerate(LENGTHS):
        yield row, tokens[row : row + 1, :length], order[row : row + 1, :length]


def config_of(system):
    model = make_system(system).config
    kind = "ao_ar"
    if model.is_encoder:
        kind = "score_entropy" if model.noise else "k_dce"
    return Config(
        model=model,
        objective=ObjectiveConfig(kind),
        order=OrderConfig("random"),
        train=TrainConfig(batch_size=4, micro_batch_size=1),
        seed=3,
    )


def test_lengths_of_records_are_counted_by_split(tmp_path, capsys):
    """Also of a prompt, and where end-of-text is a part of the text."""
    rows = [{"text": "abc"}, {"text": "[GIVEN]ab[/GIVEN]c"}, {"text": "abcdefg"}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    test = write_rows(tmp_path / "b.jsonl", [{"text": "<|endoftext|>ab"}])
    folder = prepared("records", tmp_path / "o", source, test=(test,), block_size=16)
    entries = load_meta(folder)["splits"]
    total = collections.Counter()
    for split in ("train", "val"):
        total.update(entries[split]["lengths"])
    assert total == {"3": 2, "7": 1}
    assert entries["test"]["lengths"] == {"15": 1}
    # The length of an answer depends on its question, so the end is to be predicted.
    assert f"--data.folder {folder} --model.block-size 16\n" in capsys.readouterr().out
    whole = prepared("records", tmp_path / "w", test, val=(test,), block_size=16)
    options = f"--data.folder {whole} --model.block-size 16 --data.end given\n"
    assert options in capsys.readouterr().out
    text = prepared("text", tmp_path / "p", source)
    assert "lengths" not in load_meta(text)["splits"]["train"]
    assert f"--data.folder {text}\n" in capsys.readouterr().out


def test_an_example_of_which_a_tokenizer_leaves_nothing_is_refused():
    """As a `tokenizer.json` that drops white space: its loss would be 0 / 0."""
    empty = types.SimpleNamespace(encode=lambda text: [], eot=0, dtype=np.uint16)
    with pytest.raises(UserError, match="no token to predict"):
        encode_example(empty, block_size=4, end=True, example=" ")


words = st.text(
    st.characters(exclude_characters="[]", codec="utf-8"), min_size=1, max_size=6
)


@given(
    st.lists(st.tuples(words, st.booleans()), min_size=1, max_size=6),
    words,
    st.booleans(),
)
def test_an_example_has_the_bytes_and_roles_of_its_parts(parts, last, end):
    example = ""
    expected = []
    for text, is_given in [*parts, (last, False)]:
        example += as_prompt(text) if is_given else text
        role = PROMPT if is_given else PREDICTED
        expected += [(byte, role) for byte in text.encode()]
    if end:
        expected.append((256, PREDICTED))
    expected += [(256, PADDING)] * (200 - len(expected))
    ids, roles = encode_example(get_tokenizer("bytes"), 200, end, example)
    assert list(zip(ids, roles, strict=True)) == expected


@pytest.mark.parametrize(
    "example, says",
    [
        ("[GIVEN]a", "without its other mark"),
        ("[GIVEN]a[/GIVEN]", "no text to predict"),
        ("", "no text to predict"),
    ],
)
def test_marks_that_do_not_fit_are_refused(example, says):
    with pytest.raises(UserError, match=f"here: .*{says}"):
        spans(example, "here")


def test_examples_are_prepared_one_a_block(tmp_path):
    rows = [{"prompt": f"{i}+1=", "text": str(i + 1)} for i in range(30)]
    rows.append({"text": "a[GIVEN]b[/GIVEN]c"})
    rows.append({"text": "a[GIVEN]b[/GIVEN]c[GIVEN]\u00e9d[/GIVEN]"})
    source = write_rows(tmp_path / "rows.jsonl", rows)
    folder = prepared("records", tmp_path / "data", source, block_size=8, split="test")
    data = TokenDataset(folder, "test", 8, verify=True)
    assert data.of_records
    assert data.num_blocks == 32
    assert data.meta["format"] == 2
    blocks = data.blocks([12, 30, 31])
    roles = data.roles([12, 30, 31])
    eot = 256
    assert blocks.tolist() == [
        [*b"12+1=13", eot],
        [*b"abc", *[eot] * 5],
        [*"abc\u00e9d".encode(), eot, eot],
    ]
    assert roles.tolist() == [
        [1] * 5 + [0] * 3,
        [0, 1, 0, 0, 2, 2, 2, 2],
        [0, 1, 0, 1, 1, 1, 0, 2],
    ]
    (folder / "test.roles.bin").write_bytes(bytes(256))
    with pytest.raises(UserError, match="test.roles.bin is damaged"):
        TokenDataset(folder, "test", 8, verify=True)
    (folder / "test.roles.bin").write_bytes(b"\0")
    with pytest.raises(UserError, match="test.roles.bin is damaged"):
        TokenDataset(folder, "test", 8)


def test_prompts_of_another_field_and_records_that_are_too_long(tmp_path, capsys):
    rows = [{"question": "?" * n, "answer": "!", "id": n} for n in range(1, 13)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    answers = partial(prepared, "records", block_size=8, split="test", field="answer")
    says = "6 records longer than a block of 8 tokens, the longest has 14: give"
    with pytest.raises(UserError, match=says):
        answers(tmp_path / "data", source, prompt_field="question")
    short = partial(answers, prompt_field="question", skip_long=True)
    folder = short(tmp_path / "data", source)
    said = capsys.readouterr().out
    assert "note: 6 records longer than a block of 8 tokens skipped" in said
    # The prompts themselves, as texts.
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "abc"}])
    alone = prepared(
        "records",
        tmp_path / "alone",
        prompts,
        block_size=8,
        split="test",
        field="prompt",
    )
    texts = TokenDataset(alone, "test", 8).blocks([0]).tolist()
    assert texts == [[*b"abc", *[256] * 5]]
    data = TokenDataset(folder, "test", 8, verify=True)
    assert data.num_blocks == 6
    assert data.blocks([1]).tolist() == [[*b"??!", *[256] * 5]]
    assert data.roles([1]).tolist() == [[1, 1, 0, 0, 2, 2, 2, 2]]


@pytest.mark.parametrize(
    "row, options, says",
    [
        ({"text": "b"}, {"block_size": None}, "records needs --block-size N"),
        ({"text": "b"}, {"split": None}, "a single record or character makes no"),
        ({"prompt": "[GIVEN]a", "text": "b"}, {}, "line 1: .*not both"),
        ({"prompt": 1, "text": "b"}, {}, "line 1: .*'prompt' .int"),
        ({"q": "b"}, {"field": "q", "prompt_field": "q"}, "are both 'q'"),
        ({"text": "b"}, {"protocol": "full"}, "records takes no --protocol"),
    ],
)
def test_what_cannot_be_prepared_is_said(tmp_path, row, options, says):
    source = write_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(UserError, match=says):
        of_test = partial(prepared, "records", block_size=8, split="test")
        of_test(tmp_path / "out", source, **options)
    assert not (tmp_path / "out").exists()


def test_what_is_given_comes_first_and_what_is_absent_last():
    order = random_orders(batch_size=4, length=6, seed=0)
    roles = Roles.of(ROLES)
    assert roles.lengths.tolist() == LENGTHS
    for row, mine, drawn in zip(
        ROLES.tolist(), roles.first_given(order), order, strict=True
    ):
        of_role = [[p for p in drawn.tolist() if row[p] == role] for role in range(3)]
        expected = sorted(of_role[PROMPT]) + of_role[PREDICTED] + of_role[PADDING]
        assert mine.tolist() == expected


SYSTEMS = ["AO-GPT", "target rotary", "two_stream", "sigma-GPT"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_loss_of_a_decoder_is_the_mean_over_the_predicted_tokens_of_a_batch(system):
    """Whatever stands at absent positions, and however the batch is cut into
    micro-batches. 1e-6: the weights of the loss are float32."""
    model = make_system(system)
    config = config_of(system)
    tokens = random_tokens(TOKENS, batch_size=4, length=6, seed=0)
    roles = Roles.of(ROLES)

    order = roles.first_given(orders_at(config.order, 3, 5, range(4), 6))
    expected = 0.0
    for row, own, its_order in rows_of(tokens, order):
        scored = roles.predicted[row].gather(0, its_order[0])
        expected -= (token_log_probs(model, own, its_order)[0] * scored).sum().item()

    losses = []
    for row in range(4):  # micro-batches of one
        one = Roles(roles.predicted[row : row + 1], roles.given[row : row + 1])
        mean = float(roles.predicted.sum()) / 4
        junk = torch.where(roles.predicted | roles.given, tokens, 1)[row : row + 1]
        batch = make_batch(junk, config, 5, range(row, row + 1), one, mean)
        losses.append(config.objective.definition.loss(model, batch, config.objective))
    assert torch.stack(losses).mean().item() == pytest.approx(expected / 15, abs=1e-6)


@pytest.mark.parametrize(
    "system, group",
    [
        *itertools.product(["AO-GPT", "two_stream"], [1, 2, 4]),
        *itertools.product(["RADD", "SEDD"], [2, 4]),
    ],
)
def test_groups_begin_after_what_is_given(system, group):
    """Against each record alone, cut by hand: 1e-12, float64."""
    model = make_system(system)
    roles = Roles.of(ROLES)
    tokens = random_tokens(TOKENS, batch_size=4, length=6, seed=1)
    orders = OrderConfig("random")
    nll = token_nll(
        model,
        tokens,
        orders,
        seed=3,
        draw=0,
        rows=range(4),
        total=4,
        group=group,
        roles=roles,
    )
    assert torch.equal(nll.scored, roles.predicted)
    order = roles.first_given(
        orders_at(orders, seed=3, step=0, rows=range(4), length=6, stream=SCORED_ORDERS)
    )
    for row, own, its_order in rows_of(tokens, order):
        first = int(roles.given[row].sum())
        for step in range(first, LENGTHS[row]):
            start = step - (step - first) % group
            if model.config.is_encoder:
                masked = torch.zeros(1, LENGTHS[row], dtype=torch.bool)
                masked[0, its_order[0, start:]] = True
                expected = -masked_log_probs(model, own, masked)[0, its_order[0, step]]
            elif system == "two_stream":
                starts = group_starts(its_order, group, torch.tensor([first]))
                expected = model(own, its_order, starts)[0, step]
            else:
                starts = torch.full_like(its_order, start)
                expected = -token_log_probs(model, own, its_order, starts)[0, step]
            got = nll.values[row, its_order[0, step]].item()
            assert got == pytest.approx(expected.item(), abs=1e-12)
    starts = group_starts(torch.arange(6).expand(2, 6), 2, torch.tensor([3, 0]))
    assert starts.tolist() == [[0, 1, 2, 3, 3, 5], [0, 0, 2, 2, 4, 4]]


def test_masks_of_records_hide_every_set_of_predicted_tokens_as_they_should(seed=0):
    """k_dce: the number is uniform on 1 to n, and of a number all sets are as
    frequent."""
    roles = Roles.of(torch.tensor([[0, 1, 0, 0, 2]]).expand(6000, 5))
    for masks in (
        masks_at(
            ObjectiveConfig("k_dce"),
            seed,
            step=0,
            rows=range(6000),
            total=6000,
            length=5,
            roles=roles,
        ),
        evaluation_masks(
            seed, step=1, rows=range(6000), total=6000, length=5, roles=roles
        ),
    ):
        assert not (masks.masked & ~roles.predicted).any()
        assert torch.equal(masks.lengths, torch.full((6000,), 4))
        size = masks.masked.sum(dim=1)
        assert torch.equal(masks.weight, 3 / size)
        sets = [
            *itertools.combinations((0, 2, 3), 1),
            *itertools.combinations((0, 2, 3), 2),
            (0, 2, 3),
        ]
        counts = collections.Counter(
            tuple(row.nonzero().flatten().tolist()) for row in masks.masked
        )
        observed = torch.tensor([counts[s] for s in sets])
        of_each = [1 / 3 / (3 if len(s) < 3 else 1) for s in sets]
        assert accept(observed, torch.tensor(of_each, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["k_dce", "lambda_dce", "t_dce", "score_entropy"])
def test_masks_where_all_is_predicted_are_those_of_text(kind):
    """SEDD's weights are another formula for the same number: 1e-9, relative,
    float64."""
    config = ObjectiveConfig(kind)
    rows = range(8)
    plain = masks_at(config, seed=0, step=3, rows=rows, total=8, length=6)
    roles = Roles.of(torch.zeros(8, 6))
    records = masks_at(
        config, seed=0, step=3, rows=rows, total=8, length=6, roles=roles
    )
    assert torch.equal(plain.masked, records.masked)
    torch.testing.assert_close(
        plain.weight.double(), records.weight.double(), rtol=1e-9, atol=0
    )
    torch.testing.assert_close(plain.sigma, records.sigma)


@pytest.mark.parametrize("system", ["RADD", "SEDD", "encoder AO-GPT"])
def test_an_encoder_does_not_see_what_is_absent(system):
    model = make_system(system)
    config = config_of(system)
    roles = Roles.of(ROLES)
    tokens = random_tokens(TOKENS, batch_size=4, length=6, seed=2)
    other = tokens.where(roles.predicted | roles.given, (tokens + 1) % TOKENS)
    batch = make_batch(tokens, config, 0, range(4), roles, 3.75)
    of_other = make_batch(other, config, 0, range(4), roles, 3.75)
    loss = config.objective.definition.loss(model, batch, config.objective)
    assert torch.equal(
        loss, config.objective.definition.loss(model, of_other, config.objective)
    )
    assert loss.isfinite()
    if not model.config.noise:  # by hand, record by record
        total = 0.0
        for row, own, _ in rows_of(tokens, tokens):
            masked = batch.masks.masked[row : row + 1, : LENGTHS[row]]
            n = int(roles.predicted[row].sum())
            k = int(masked.sum())
            total -= n / k * masked_log_probs(model, own, masked).sum().item()
        assert loss.item() == pytest.approx(total / 15, rel=1e-6)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Records of different lengths: a prompt and the same letters again."""
    folder = tmp_path_factory.mktemp("questions")
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(300):
        word = "".join(rng.choice(list("abcd"), size=rng.integers(2, 7)))
        rows.append({"prompt": f"{word}=", "text": word})
    return prepared(
        "records", folder / "data", write_rows(folder / "r.jsonl", rows), block_size=16
    )


@pytest.mark.parametrize("system", ["AO-GPT", "encoder", "plain GPT", "two streams"])
def test_every_system_trains_on_records_and_is_validated_on_what_is_predicted(
    questions, tmp_path, system, capsys
):
    config = of_system(tiny_config(questions, tmp_path, steps=6), system)
    assert train.train(config, ALONE) == 0
    said = (
        f'sample.py {config.run_folder} --mode l2r --prompt "..." --until-end, or more'
    )
    assert said in capsys.readouterr().out
    dataset = TokenDataset(questions, "train", 16)
    tokens = metrics(config, "tokens")
    for step in range(6):  # counted are those that are predicted
        roles = dataset.roles(dataset.indices(7, step, range(8), 8))
        assert tokens[step + 1] - tokens.get(step, 0) == (roles == 0).sum()
    losses = metrics(
        config, "val_loss_l2r" if system == "plain GPT" else "val_loss_random"
    )
    # 320 ids: an untrained model is near log 320 = 5.77 nats for each token that
    # counts, and 0 for the others would show.
    assert losses.keys() == {5, 6}
    assert all(4 < loss < 7 for loss in losses.values())


def test_a_trained_model_goes_on_with_records_that_are_shorter_than_its_blocks(
    questions, data, tmp_path
):
    """Fine-tuning: the weights of a run on text, records of 16 tokens under blocks of
    24."""
    text = tiny_config(data, tmp_path, "text", steps=5, model__block_size=24)
    assert train.train(text, ALONE) == 0
    tuned = tiny_config(
        questions,
        tmp_path,
        "tuned",
        steps=5,
        model__block_size=24,
        train__init_from=str(text.run_folder),
    )
    assert train.train(tuned, ALONE) == 0
    assert 0 < metrics(tuned, "tokens")[5] < 5 * 8 * 16
    with pytest.raises(ValueError, match="set the model's block_size to 16,"):
        train.train(
            tiny_config(questions, tmp_path, "small", model__block_size=8), ALONE
        )


def test_the_mean_is_over_the_tokens_of_the_global_batch(questions, tmp_path):
    data = TokenDataset(questions, "train", 16)
    config = tiny_config(questions, tmp_path)
    whole, mean = roles_of(data, config, 3, range(8))
    part, same = roles_of(data, config, 3, range(2, 4))
    assert mean == same == whole.predicted.sum() / 8
    assert torch.equal(part.predicted, whole.predicted[2:4])
    tokens = data.batch(config.seed, 3, range(8), 8)
    assert torch.equal((tokens == ord("=")).sum(1), torch.ones(8).long())
    assert torch.equal(whole.given.sum(1), (tokens == ord("=")).long().argmax(1) + 1)


def test_a_model_that_reads_from_left_to_right_needs_prompts(tmp_path):
    source = write_rows(tmp_path / "r.jsonl", [{"text": "a[GIVEN]b[/GIVEN]c"}] * 40)
    folder = prepared("records", tmp_path / "data", source, block_size=16)
    gpt = tiny_config(folder, tmp_path, order=OrderConfig("l2r"), model__target="none")
    with pytest.raises(ValueError, match="not the beginning of their sequence"):
        train.train(gpt, ALONE)
