"""Records whose end is given: lengths, likelihoods that sum to 1, samples that end."""

import collections
import itertools
import json
import math

import pytest
import torch
from helpers import (
    change,
    documents,
    encoder_config,
    metrics,
    of_system,
    prepared,
    read_lines,
    tiny_config,
    write_config,
    write_rows,
)
from reference import LEVEL, chi_square_p, make_system

import aogpt
import convert
import eval_gen
import eval_ppl
import sample
import train
from aogpt.checkpoints import Loaded, load
from aogpt.data.loader import TokenDataset, load_meta
from aogpt.data.prompts import END_GIVEN, PADDING, PREDICTED
from aogpt.data.record_end import RecordEnd
from aogpt.model import IMPOSSIBLE
from aogpt.objectives import ObjectiveConfig, masked_nll, masks_at
from aogpt.orders import Roles
from aogpt.runtime.errors import UserError
from aogpt.training.batches import make_batch, roles_of

AB = RecordEnd(token=2, lengths=(2, 0, 3, 5))  # of a block of four
STRINGS = ["".join(s) for n in range(4) for s in itertools.product("ab", repeat=n)]
SYSTEMS = [
    "AO-GPT",
    "sigma-GPT",
    "shared",
    "per_block",
    "target rotary",
    "two_stream",
    "mask_query",
    "mask_query, rotary",
    "Llama, A3",
    "encoder AO-GPT",
    "RADD",
    "SEDD",
]
DECODERS = ["AO-GPT", "target rotary", "two_stream", "mask_query"]


def of_records(system, dtype=torch.float64):
    """Return a TextModel of records of two letters, with rows above the tokenizer's."""
    model = make_system(system, 3, tokens=6, block_size=4, dtype=dtype, scale=2.0)
    model.eval().exclude(3, AB.token)
    loaded = Loaded(model, "x", 0, "raw", "alphabet:ab", 3, record_end=AB)
    return aogpt.TextModel(loaded)


def test_lengths_have_one_more_each_and_sum_to_one():
    assert sum(math.exp(AB.log_prob(n)) for n in range(4)) == pytest.approx(1)
    assert math.exp(AB.log_prob(3)) == pytest.approx(6 / 14)
    assert AB.log_prob(4) == -math.inf
    uniforms = torch.rand(4000, generator=torch.Generator().manual_seed(0)).tolist()
    for least, most in ((0, 3), (1, 3), (2, 9)):
        counts = torch.bincount(torch.tensor(AB.draw(uniforms, least, most)))
        p = [AB.lengths[n] + 1 for n in range(least, min(most, 3) + 1)]
        expected = torch.tensor([0.0] * least + p) / sum(p) * 4000
        assert chi_square_p(counts, expected) > LEVEL


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_probabilities_of_all_records_sum_to_one(system):
    """In every order, in batches of records of all lengths as one by one. The end and
    ids above the tokenizer's have no probability within a record."""
    text = of_records(system)
    for order in ("l2r", "random"):
        scored = text.score(STRINGS, order, seed=2, end=True)
        total = sum(math.exp(-one.nats) for one in scored)
        assert total == pytest.approx(1, abs=1e-9)
        for string, in_batch in zip(STRINGS, scored, strict=True):
            (alone,) = text.score([string], order, seed=2, end=True)
            assert alone.nats == pytest.approx(in_batch.nats, abs=1e-9)
            assert alone.log_probs[-1] == AB.log_prob(len(string))


def test_alternatives_of_unequal_length_rank_as_whole_records():
    text = of_records("AO-GPT")
    (ranked, with_empty) = text.rank(["a[|a|b|bb]", "[|a]"])
    for one in [*ranked, *with_empty]:
        (scored,) = text.score([one.text], end=True)
        assert one.log_prob == pytest.approx(-scored.nats)


def test_a_gpt_sums_to_one_with_what_does_not_end():
    """It predicts the end: all strings that fit, and the mass of those that do not."""
    model = make_system("GPT-2", 3, tokens=3, block_size=4)
    text = aogpt.TextModel(Loaded(model.eval(), "x", 0, "raw", "alphabet:ab", 3))
    total = sum(math.exp(-one.nats) for one in text.score(STRINGS, end=True))
    unfinished = ["".join(s) for s in itertools.product("ab", repeat=4)]
    total += sum(math.exp(-one.nats) for one in text.score(unfinished))
    assert total == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("system", [*DECODERS, "RADD", "SEDD"])
def test_samples_of_records_have_their_probabilities(system):
    text = of_records(system)
    samples = text.generate([""], num_samples=600, temperature=1.0, mode="l2r")
    counts = collections.Counter(one.text for one in samples)
    assert counts.keys() <= set(STRINGS)
    scores = text.score(STRINGS, end=True)
    expected = torch.tensor([600 * math.exp(-one.nats) for one in scores])
    expected = expected.double() * (600 / expected.double().sum())
    observed = torch.tensor([counts[string] for string in STRINGS])
    assert chi_square_p(observed, expected) > LEVEL


@pytest.mark.parametrize(
    "system, mode",
    [
        ("AO-GPT", "mdm"),
        ("AO-GPT", "even:steps=2"),
        ("AO-GPT", "slots:block=2"),
        ("AO-GPT", "margin:threshold=0.3"),
        ("AO-GPT", "speculative"),
        ("two_stream", "entropy:block=2"),
        ("mask_query", "speculative"),
        ("RADD", "confidence"),
    ],
)
def test_every_mode_ends_samples_where_their_length_says(system, mode):
    text = of_records(system, torch.float32)
    samples = text.generate(["", "b"], num_samples=60, mode=mode)
    left_to_right = text.generate(["", "b"], num_samples=60, mode="l2r")
    assert {one.text[0] for one in samples[60:]} == {"b"}
    assert {len(one.text) for one in samples} == {0, 1, 2, 3}
    for one, other in zip(samples, left_to_right, strict=True):
        assert len(one.log_probs) == len(one.tokens) == len(other.text)
        assert sorted(one.order) == list(range(len(one.text)))
        assert AB.token not in one.tokens
    assert {len(one.text) for one in text.generate(["a"], 1, 5, mode=mode)} == {2}
    (filled,) = text.fill(["a[MASK]b"], mode=mode)
    assert filled.text in ("aab", "abb")
    assert filled.log_probs[0] == filled.log_probs[2] == 0


@pytest.mark.parametrize("system", [*DECODERS, "RADD", "SEDD"])
def test_the_text_api_knows_the_end_of_a_record(system):
    """The same joint by the chain rule; blanks by one token."""
    text = of_records(system)
    ((likely,),) = text.blanks(["a[MASK]b"])
    assert sum(one.probability for one in likely) == pytest.approx(1)
    for one in likely[:2]:
        assert one.text in "ab"
        (joint,) = text.score([f"a{one.text}b"], predict=[(1, 2)])
        assert math.exp(joint.log_prob) == pytest.approx(one.probability)
    both = [f"a{s}" for s in map("".join, itertools.product("ab", repeat=2))]
    for orders in (1, 2):
        joints = text.score(both, predict=[(1, 3)], orders=orders)
        assert sum(math.exp(one.log_prob) for one in joints) == pytest.approx(1)
    (pairs,) = text.pairs(["abb"], 2, 0)
    assert sum(map(sum, pairs.table)) == pytest.approx(1)
    assert {one.text for one in pairs.first} == set("ab")
    for call, words in (
        (lambda: text.score(["abab"]), "4 tokens, and this model takes 3 at once"),
        (lambda: text.score(["a<|endoftext|>b"]), "a record of this model has one end"),
        (lambda: text.blanks(["abb[MASK]"]), "exceed"),
        (lambda: text.generate(["abab"]), "at most 3"),
        (lambda: text.score([""]), "there is no text"),
    ):
        with pytest.raises(UserError, match=words):
            call()


# ---- runs ----------------------------------------------------------------------------

WORDS = ["a", "ab", "abc", "abcabc", "abcabcabcabc", "bca", "bcabca"]


def data_of(tmp_path, name="data", rows=None, alphabet="abc", **options):
    rows = rows or [{"text": WORDS[n % 7]} for n in range(600)]
    source = write_rows(tmp_path / f"{name}.jsonl", rows)
    options.setdefault("block_size", 16)
    tokenizer = "bytes" if alphabet is None else f"alphabet:{alphabet}"
    return prepared("records", tmp_path / name, source, tokenizer=tokenizer, **options)


def config_of(data, tmp_path, name="run", end="given", **changes):
    changes.setdefault("eval__sequences", 30)  # all
    out = tmp_path / "out"
    return tiny_config(data, out, name, data__end=end, model__dropout=0.0, **changes)


def test_a_given_end_is_no_prediction(tmp_path):
    data = data_of(tmp_path)
    config = config_of(data, tmp_path)
    dataset = TokenDataset(data, "train", 16)
    before = dataset.roles(range(4)).clone()
    predicted = dataset.predicted(7, 0, 8)
    dataset.give_end()
    roles = dataset.roles(range(4))
    lengths = (roles != PADDING).sum(1)
    assert torch.equal(lengths, (before != PADDING).sum(1))
    tokens = dataset.blocks(range(4))
    for row, length in enumerate(lengths.tolist()):
        assert roles[row, length - 1] == END_GIVEN
        assert (roles[row, : length - 1] == PREDICTED).all()
        assert tokens[row, length - 1] == 3
    assert dataset.predicted(7, 0, 8) == predicted - 8
    of_rows, mean = roles_of(dataset, config, 0, range(4))
    batch = make_batch(
        dataset.batch(7, 0, range(4), 8), config, 0, range(4), of_rows, mean
    )
    ends = of_rows.lengths - 1
    assert torch.equal(batch.order[:, 0], ends)
    assert (batch.weight[:, 0] == 0).all()
    assert torch.equal((batch.weight > 0).sum(1), ends)
    objective = encoder_config(config).objective
    masks = masks_at(objective, 0, 0, range(4), 4, 16, roles=Roles.of(roles))
    assert not masks.masked[range(4), lengths - 1].any()


def test_losses_at_ids_that_are_excluded_are_no_nan():
    """The end is a target of weight 0: 0 times infinity would be NaN."""
    for system in ("AO-GPT", "RADD"):
        text = of_records(system, torch.float32)
        tokens = torch.tensor([[0, 1, 2]])
        if system == "RADD":
            roles = Roles.of(torch.tensor([[0, 0, 3]]))
            objective = ObjectiveConfig("k_dce")
            masks = masks_at(objective, 0, 0, range(1), 1, 3, roles=roles)
            loss = masked_nll(text.model, tokens, masks).sum()
        else:
            nll = text.model(tokens, torch.tensor([[2, 0, 1]]))
            assert nll[0, 0] > -IMPOSSIBLE / 2
            loss = (nll * torch.tensor([[0.0, 1.0, 1.0]])).sum()
        loss.backward()
        assert loss.isfinite()
        for parameter in text.model.parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on records whose end is given, and its data."""
    folder = tmp_path_factory.mktemp("records")
    config = config_of(
        data_of(folder), folder, steps=120, eval__interval=120, checkpoint__interval=120
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train", str(write_config(config))])
        train.main()
    return config


def test_samples_in_random_order_end_once_each(run, tmp_path, printed, mistake):
    file = tmp_path / "s.jsonl"

    def draw(*options):
        printed(sample, run.run_folder, "--overwrite", "--jsonl", file, *options)
        return read_lines(file)

    rows = draw("--mode", "random", "--num-samples", 400)
    assert len(rows) == 400
    end = load(run.run_folder).record_end
    histogram = load_meta(run.data.folder)["splits"]["train"]["lengths"]
    assert {str(n): count for n, count in enumerate(end.lengths) if count} == histogram
    assert not any(end.token in row["tokens"] for row in rows)
    assert all(len(row["text"]) == row["length"] == len(row["step"]) for row in rows)
    counts = torch.zeros(16)
    for row in rows:
        counts[row["length"]] += 1
    expected = [400 * math.exp(end.log_prob(n)) for n in range(16)]
    assert chi_square_p(counts, torch.tensor(expected).double()) > LEVEL
    # it has learned something
    assert sum(row["text"] in WORDS for row in rows) > 200

    for row in draw("--prompt", "bc", "--mode", "confidence", "--num-samples", 20):
        assert row["text"].startswith("bc")
        assert row["step"][:2] == [-1, -1]
    for row in draw("--prompt", "bc", "--length", 4):
        assert row["length"] == 4
    for row in draw("--prompt", "a[MASK]c[MASK:3]"):
        assert (row["length"], row["text"][0], row["text"][2]) == (6, "a", "c")
    for row in draw("--prompts", run.data.folder, "--rows", 1, "--num-samples", 2):
        assert row["prompt"] == f"[MASK:{row['length']}]"
    for options, words in (
        (["--until-end"], "--until-end: this run knows the end"),
        (["--length", 16], "at most 15"),
        (["--prompt", "[MASK:16]"], "exceed"),
        (["--prompts", run.data.folder, "--length", 4], "leave out the length"),
    ):
        assert words in mistake(sample, run.run_folder, *options)


def test_an_export_knows_the_end_of_records(run, tmp_path):
    out = tmp_path / "export"
    convert.convert(str(run.run_folder), out)
    text = aogpt.load(out)
    ours = aogpt.load(run.run_folder)
    assert text.end == ours.end
    assert text.score(["abcabc"], end=True) == ours.score(["abcabc"], end=True)
    assert [one.text for one in text.generate([""], num_samples=4)] == [
        one.text for one in ours.generate([""], num_samples=4)
    ]


def test_validation_and_perplexity_are_of_the_same_tokens(run, tmp_path, printed):
    """Left to right both are exact: the mean over the tokens before the ends."""
    file = tmp_path / "p.json"
    options = ["--datasets", run.data.folder, "--orders", "l2r", "--json", file]
    printed(eval_ppl, run.run_folder, *options)
    (row,) = json.loads(file.read_text())["results"]
    model = aogpt.load(run.run_folder)
    # Padding is of ends.
    texts = [text for text in documents(run.data.folder, "val") if text]
    nats = sum(one.nats for one in model.score(texts))
    assert row["nll"] == pytest.approx(nats / sum(map(len, texts)), rel=1e-4)
    whole = sum(one.nats for one in model.score(texts, end=True))
    assert row["nats_per_record"] == pytest.approx(whole / len(texts), rel=1e-4)
    final = metrics(run, "val_loss_l2r")[120]
    assert final == pytest.approx(row["nll"], rel=1e-4)


def test_a_set_to_score_takes_the_lengths_of_the_model(run, tmp_path, printed):
    """It has no training records of its own."""
    rows = [{"text": WORDS[n % 7]} for n in range(21)]
    data = data_of(tmp_path, "other", rows, split="test")
    file = tmp_path / "p.json"
    options = ["--datasets", data, "--orders", "l2r", "--json", file]
    printed(eval_ppl, run.run_folder, *options)
    (row,) = json.loads(file.read_text())["results"]
    whole = aogpt.load(run.run_folder).score(WORDS, end=True)
    mean = sum(one.nats for one in whole) / len(WORDS)
    assert row["nats_per_record"] == pytest.approx(mean, rel=1e-4)


def test_nats_of_a_record_are_given_its_prompt(run, tmp_path, printed):
    """A sample that goes on with a prompt draws a length that it fits."""
    rows = [{"prompt": "abcabca", "text": text} for text in ("b", "bca")]
    data = data_of(tmp_path, "prompts", rows, split="test")
    file = tmp_path / "p.json"
    options = ["--datasets", data, "--orders", "l2r", "--json", file]
    printed(eval_ppl, run.run_folder, *options)
    (row,) = json.loads(file.read_text())["results"]
    model = aogpt.load(run.run_folder)
    fits = sum(math.exp(model.end.log_prob(n)) for n in range(7, 16))
    nats = 0.0
    for text in ("abcabcab", "abcabcabca"):
        (scored,) = model.score([text], end=True)
        nats += -sum(scored.log_probs[7:]) + math.log(fits)
    assert row["nats_per_record"] == pytest.approx(nats / 2, rel=1e-4)


def test_a_model_of_records_that_end_is_no_judge(run, tmp_path, mistake):
    """It reads the end first, which a judge does not give it."""
    file = write_rows(tmp_path / "samples.jsonl", [{"text": "abc"}])
    message = mistake(eval_gen, file, "--judge", run.run_folder)
    assert "was trained on records whose end is given" in message


@pytest.mark.parametrize("system", ["encoder", "two streams"])
def test_other_systems_train_and_sample(system, tmp_path, printed):
    config = of_system(config_of(data_of(tmp_path), tmp_path, steps=6), system)
    printed(train, write_config(config))
    assert metrics(config, "val_loss_random")[6] < 10
    words = ["--mode", "confidence", "--num-samples", 5]
    printed(sample, config.run_folder, *words)


def test_what_does_not_fit_is_one_line(run, tmp_path, mistake):
    data = data_of(tmp_path)
    with pytest.raises(UserError, match="for any-order models: a plain GPT"):
        config_of(data, tmp_path, model__target="none")
    rows = [{"text": "abc" * 300} for _ in range(40)]
    source = write_rows(tmp_path / "text.jsonl", rows)
    text = prepared("text", tmp_path / "text", source, tokenizer="alphabet:abc")
    config = config_of(text, tmp_path, "text")
    message = "has no lengths of records that end"
    assert message in mistake(train, write_config(config))
    changed = change(run, data__end="predicted", train__steps=130)
    assert "data.end = 'given', but now" in mistake(train, write_config(changed))
    assert message in mistake(eval_ppl, run.run_folder, "--datasets", text)
    dataset = TokenDataset(data, "val", 16)
    dataset._blocks = dataset._blocks.copy()
    dataset._blocks[1, 0] = 3
    with pytest.raises(UserError, match="record 2 of val .* has its end, id 3, inside"):
        dataset.give_end()


def test_records_that_fill_their_block_have_roles_where_the_end_is_given(tmp_path):
    rows = [{"text": "abcabc"} for _ in range(60)]
    data = data_of(tmp_path, "full", rows, block_size=7)
    dataset = TokenDataset(data, "train", 7)
    assert not dataset.of_records
    dataset.give_end()
    assert dataset.roles(range(2)).tolist() == [[PREDICTED] * 6 + [END_GIVEN]] * 2
