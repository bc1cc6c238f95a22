"""eval_gen.py, judges and sets of samples: known judges; the same numbers however they
are had."""

import dataclasses
import functools
import itertools
import json
import math

import numpy as np
import pytest
import torch
from helpers import LENGTH, column, read_lines, torchrun, write_jsonl, write_rows
from test_tokenizer_files import around, saved

import eval_gen
import sample
from aogpt.checkpoints import load as load_checkpoint
from aogpt.checkpoints import load_model, store
from aogpt.data.tokenizers import BytesTokenizer, get_tokenizer
from aogpt.evaluation import judges, sample_sets
from aogpt.runtime.errors import UserError
from aogpt.runtime.processes import Processes
from aogpt.scoring import token_log_probs

CPU = torch.device("cpu")
ALONE = Processes(0, 1, CPU)
# p(column | row) of the symbols a, b, c and end-of-text
BIGRAM = [
    [1 / 2, 1 / 4, 1 / 8, 1 / 8],
    [1 / 4, 1 / 4, 1 / 4, 1 / 4],
    [1 / 8, 1 / 8, 1 / 4, 1 / 2],
    [1 / 8, 1 / 2, 1 / 4, 1 / 8],
]
# Costs (bits) of b|a a|b a|a c|a c|c: 2 + 2 + 1 + 3 + 2
TEXT = "abaacc"
BITS = 10


def save_bigram(folder, context=64, start=False, end="<|endoftext|>"):
    """Save a Llama whose blocks do nothing and whose head knows the next symbol's
    distribution. start: its tokenizer puts end-of-text in front."""
    import tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    log_probs = torch.tensor(BIGRAM, dtype=torch.float64).log()
    V = len(log_probs)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=V,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=context,
        rms_norm_eps=1e-12,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(V))
        model.model.norm.weight.fill_(1)  # of a unit vector the norm makes sqrt(V)
        model.lm_head.weight.copy_(log_probs.T / math.sqrt(V))
    model.save_pretrained(folder)
    vocabulary = {symbol: i for i, symbol in enumerate("abc")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.add_special_tokens([end])
    if start:
        around(tokenizer, f"{end} $A")
    saved(tokenizer, folder, tokenizer_config={"eos_token": end})
    return folder


@pytest.fixture(scope="module")
def bigram(tmp_path_factory):
    return save_bigram(tmp_path_factory.mktemp("bigram"))


@pytest.fixture
def write(tmp_path):
    """Write rows to a .jsonl file; returns its path."""
    return functools.partial(write_rows, tmp_path / "samples.jsonl")


@pytest.fixture
def write_texts(tmp_path):
    """Write samples of which there is only text to a .jsonl file; returns its path."""
    return functools.partial(write_jsonl, tmp_path / "samples.jsonl")


@pytest.fixture
def report(script, tmp_path):
    """Run eval_gen.py; what it wrote to --json."""

    def call(*arguments):
        file = tmp_path / "result.json"
        status, _, err = script(eval_gen, *arguments, "--json", file, "--overwrite")
        assert status == 0, err
        return json.loads(file.read_text())

    return call


def with_ids(text):
    """Return a row of a file of samples with its tokens, which are bytes."""
    return {"text": text, "tokens": list(text.encode())}


def load(name):
    return judges.Judge(str(name), CPU)


def scores_of(result, row=0):
    """Everything in a row of the results but what it cost."""
    cost = ("seconds", "run", "sampler")
    return {key: value for key, value in result["rows"][row].items() if key not in cost}


def assert_same(a, b):
    """The same names and numbers; float32 sums in another order differ by about
    1e-7."""
    samples = zip(a.pop("per_sample"), b.pop("per_sample"), strict=True)
    for one, other in [(a, b), *samples]:
        assert one.keys() == other.keys()
        for key, value in one.items():
            expected = other[key]
            if isinstance(value, float):
                expected = pytest.approx(expected, rel=1e-6, nan_ok=True)
            assert value == expected, key


def test_a_judge_that_is_a_known_distribution_gives_the_exact_perplexity(
    report, write_texts, bigram
):
    """`cb` costs 3 bits; the first token of each text is not scored."""
    result = report(write_texts([TEXT, "cb"]), "--judge", bigram)
    row = result["rows"][0]
    first, second = row["per_sample"]
    for got, bits, count in ((first, BITS, 5), (second, 3, 1), (row, BITS + 3, 6)):
        assert got["perplexity"] == pytest.approx(2 ** (bits / count), rel=1e-6)
        assert got["scored_tokens"] == count
    assert row["mean_sample_perplexity"] == pytest.approx((4 + 8) / 2, rel=1e-6)
    assert second["entropy"] == pytest.approx(math.log(2))
    assert row["tokens_judged"] == "text"
    assert row["tokenizer"] is None
    assert row["nfe"] is None
    assert result["judge"]["start_token"] is False
    assert result["judge"]["context"] == 64


def test_copies_of_one_sample_do_not_look_fine(script, report, write_texts, bigram):
    """All else is that of the sample alone."""
    copies = write_texts([TEXT] * 20)
    of_copies = report(copies, "--judge", bigram)["rows"][0]
    _, out, _ = script(eval_gen, copies, "--judge", bigram)
    own = report(write_texts([TEXT]), "--judge", bigram)["rows"][0]
    assert own["distinct_samples"] == 1
    assert of_copies["distinct_samples"] == 1
    assert of_copies["samples"] == 20
    assert of_copies["perplexity_low"] is None
    assert of_copies["perplexity"] == pytest.approx(own["perplexity"])
    # A sample that is not scored is no second one.
    with_empty = report(write_texts([TEXT] * 20 + [""]), "--judge", bigram)["rows"][0]
    assert with_empty["unscored_samples"] == 1
    assert with_empty["perplexity_low"] is None
    assert "| different |" in out


def test_samples_without_a_vocabulary_at_hand_are_read_as_text(write, monkeypatch):
    def missing(name):
        if name == "gpt2":
            raise UserError("GPT-2's vocabulary cannot be downloaded")
        return get_tokenizer(name)

    monkeypatch.setattr(sample_sets, "get_tokenizer", missing)
    (samples,) = sample_sets.read_sample_sets(write([{"text": "ab", "tokens": [5, 6]}]))
    assert samples.tokenizer is None


def test_measures_are_of_the_samples_tokens_whatever_vocabulary_made_them(
    report, write, bigram
):
    """One token, of a vocabulary that nobody knows, has no entropy."""
    row = report(write([{"text": "abc", "tokens": [5]}]), "--judge", bigram)["rows"][0]
    assert row["tokens_judged"] == "retokenised"
    assert row["entropy"] == 0
    assert row["scored_tokens"] == 2


def test_a_judge_with_a_start_token_scores_every_token(tmp_path):
    """a after end-of-text costs 3 bits, c 2 bits; windows of 4 of abaa|cc."""
    judge = load(save_bigram(tmp_path, context=4, start=True))
    assert judge.start
    assert judge.context == 4
    for size in (1, 2, 3, 50):
        scores = judge.score([judge.encode(text) for text in ("ab", TEXT, "a")], size)
        assert [count for _, count in scores] == [2, 6, 1]
        bits = [nll / math.log(2) for nll, _ in scores]
        assert bits == pytest.approx([3 + 2, 8 + 2 + 2, 3], rel=1e-6)


def test_end_of_text_in_a_sample_is_the_judges_end_of_text(tmp_path):
    """Whatever the judge calls it: b after it costs 1 bit."""
    judge = load(save_bigram(tmp_path, end="</s>"))
    assert judge.encode("a<|endoftext|>b") == [0, 3, 1]
    ((nll, _),) = judge.score([judge.encode("a<|endoftext|>b")], 1)
    assert nll / math.log(2) == pytest.approx(3 + 1, rel=1e-6)


def test_only_the_same_ids_are_scored_directly(report, write, write_texts, run, bigram):
    texts = [TEXT, "caf\u00e9 ab"]
    rows = [with_ids(text) for text in texts]
    (ids,) = report(write(rows), "--judge", run)["rows"]
    (text,) = report(write_texts(texts), "--judge", run)["rows"]
    (through,) = report(write(rows), "--judge", bigram)["rows"]
    judged = [row["tokens_judged"] for row in (ids, text, through)]
    assert judged == ["ids", "text", "retokenised"]
    for one, other in zip(ids["per_sample"], text["per_sample"], strict=True):
        assert one["nll"] == pytest.approx(other["nll"], rel=1e-6)


def test_a_sample_that_retokenisation_leaves_nothing_of_is_counted_and_not_scored(
    bigram,
):
    """The judge's tokenizer knows a, b and c only. Such a row of a file is an error
    instead."""
    rows = []
    for text in ("xyz", TEXT):
        row = with_ids(text)
        row["step"] = [0] * len(text)
        rows.append(row)
    samples = sample_sets.SampleSet("run", rows, {}, None, "bytes")
    row = sample_sets.score_samples(samples, load(bigram), 4, ALONE)
    assert row["unscored_samples"] == 1
    assert row["samples"] == 2
    assert row["scored_tokens"] == 5
    assert row["perplexity"] == pytest.approx(2 ** (BITS / 5), rel=1e-6)
    assert row["per_sample"][0]["perplexity"] is None


def test_our_own_judge_is_the_model_scored_left_to_right(report, write, run, plain):
    """Against token_log_probs in float64; the run has a start token, so all tokens are
    scored."""
    rows = [with_ids("the order of any"), with_ids("mask")]
    path = write(rows)
    for name in (run, plain):
        result = report(path, "--judge", name)
        model = load_model(name).double()
        row = result["rows"][0]
        expected = []
        for ids in column(rows, "tokens"):
            order = torch.arange(len(ids))[None]
            log_probs = token_log_probs(model, torch.tensor([ids]), order)
            expected.append(-float(log_probs.sum()))
        nll = column(row["per_sample"], "nll")
        np.testing.assert_allclose(nll, expected, rtol=1e-5)
        assert column(row["per_sample"], "scored_tokens") == [16, 4]
        perplexity = math.exp(sum(expected) / 20)
        assert row["perplexity"] == pytest.approx(perplexity, rel=1e-5)
        assert row["tokens_judged"] == "ids"
        assert row["tokenizer"] == "bytes"
        assert f"{store.find(name)[-1]} (step" in result["judge"]["source"]


def test_our_own_judge_without_a_start_token_does_not_score_the_first(run, monkeypatch):
    loaded = dataclasses.replace(load_checkpoint(run), scored_from=1)
    monkeypatch.setattr(judges, "load", lambda *arguments: loaded)
    judge = load(run)
    tokens = list(b"predict the model")
    window = torch.tensor([tokens[:LENGTH]])  # the second window has nothing to score
    log_probs = token_log_probs(loaded.model, window, torch.arange(LENGTH)[None])[0, 1:]
    ((nll, count),) = judge.score([tokens], 1)
    assert count == LENGTH - 1
    assert nll == pytest.approx(-float(log_probs.sum()), rel=1e-6)
    assert judge.encode("a<|endoftext|>\u00e9") == [97, BytesTokenizer.eot, 0xC3, 0xA9]


@pytest.mark.parametrize("mode", ["mdm:steps=5", "confidence", "speculative"])
def test_a_file_of_sample_py_and_samples_of_the_same_seed_get_the_same_scores(
    script, report, run, tmp_path, mode
):
    path = tmp_path / "samples.jsonl"
    common = f"--mode {mode} --num-samples 3 --seed 4 --batch-size 1".split()
    assert script(sample, run, *common, "--top-p", 0.9, "--jsonl", path)[0] == 0
    direct = report(run, "--judge", run, *common, "--top-p", 0.9)
    read = report(path, "--judge", run)
    assert_same(scores_of(read), scores_of(direct))
    assert read["rows"][0]["run"] == str(run)
    # a sample alone in its batch takes part in all calls
    calls = read_lines(path)[0]["model_calls"]
    assert sum(s["nfe"] for s in direct["rows"][0]["per_sample"]) == calls


@pytest.mark.slow(reason="starts two processes")
@pytest.mark.parametrize("count", [1, 5])
def test_two_processes_give_the_numbers_of_one(
    report, run, write_texts, tmp_path, count
):
    """Also with fewer samples than processes, and for samples of a file."""
    path = write_texts([f"any order {i}" for i in range(3)])
    common = [run, path, "--judge", run, "--num-samples", count]
    common += ["--mode", "mdm:steps=4", "--seed", 3]
    torchrun(2, "eval_gen.py", *common, "--json", tmp_path / "two.json")
    two = json.loads((tmp_path / "two.json").read_text())
    one = report(*common)
    assert two["processes"] == 2
    for row, samples in enumerate((count, 3)):
        assert_same(scores_of(two, row), scores_of(one, row))
        assert len(two["rows"][row]["per_sample"]) == samples


def test_given_tokens_are_counted_and_said(script, report, run, tmp_path):
    path = tmp_path / "prompted.jsonl"
    script(sample, run, "--prompt", "the ", "--num-samples", 2, "--jsonl", path)
    row = report(path, "--judge", run)["rows"][0]
    assert row["given_tokens"] == 8
    assert row["tokens"] == 2 * LENGTH
    _, out, _ = script(eval_gen, path, "--judge", run)
    assert "8 tokens were given, not generated" in out
    assert "prompts" not in out
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "the "}, {"prompt": "a "}])
    options = ["--prompts", prompts, "--num-samples", 2, "--jsonl", path]
    status, _, errors = script(sample, run, *options, "--overwrite")
    assert status == 0, errors
    row = report(path, "--judge", run)["rows"][0]
    assert row["prompts"] == 2
    assert [one["prompt"] for one in row["per_sample"]] == ["the "] * 2 + ["a "] * 2
    _, out, _ = script(eval_gen, path, "--judge", run)
    assert "of 2 prompts, intervals by prompt where wider" in out


def test_errors_of_a_set_are_by_prompt_where_all_are_known(report, run, tmp_path):
    rows = []
    for prompt, text in (("a", "cab"), ("b", "faced")):
        rows += [{**with_ids(text), "prompt": prompt}] * 4
    own = report(write_rows(tmp_path / "a.jsonl", rows), "--judge", run)["rows"][0]
    two = report(write_rows(tmp_path / "b.jsonl", rows[::4]), "--judge", run)["rows"][0]
    for key in ("perplexity", "standard_error", "perplexity_low", "perplexity_high"):
        assert own[key] == pytest.approx(two[key], rel=1e-5), key
    error = "entropy_standard_error"
    assert own[error] == pytest.approx(two[error])
    rows[0] = with_ids("cab")  # of an unknown prompt
    mixed = report(write_rows(tmp_path / "c.jsonl", rows), "--judge", run)["rows"][0]
    assert mixed["prompts"] is None
    assert mixed[error] < own[error] / 1.5


def test_a_sweep_over_runs_and_modes_is_one_table(script, run, encoder, tmp_path):
    options = ["--json", tmp_path / "gen.json", "--length", 9]
    options += "--num-samples 4 --mode mdm:steps=2 l2r:group=2".split()
    options += "--temperature 0.9 --top-p 0.95 --top-k 50".split()
    status, out, err = script(eval_gen, run, encoder, "--judge", run, *options)
    assert status == 0, err
    rows = json.loads((tmp_path / "gen.json").read_text())["rows"]
    text = (tmp_path / "gen.md").read_text()
    table = [line for line in out.splitlines() if line.startswith("|")]
    cases = itertools.product(
        (run, encoder), {"mdm:steps=2": 2, "l2r:group=2": 5}.items()
    )
    for row, line, (folder, (mode, most)) in zip(rows, table[2:], cases, strict=True):
        settings = {
            "run": str(folder),
            "mode": mode,
            "temperature": 0.9,
            "top_p": 0.95,
            "top_k": 50,
            "seed": 0,
            "length": 9,
            "dtype": "float32",
        }
        assert row["sampler"].items() >= settings.items()
        assert "(step" in row["sampler"]["checkpoint"]
        assert 0 < row["nfe"] <= most
        assert row["seconds"] > 0
        assert row["perplexity_low"] < row["perplexity"] < row["perplexity_high"]
        assert f"{row['perplexity']:.2f}" in line
    assert all(line in text for line in table)
    assert "python eval_gen.py" in text
    assert "top_k 50" in out
    assert "9 to 9 tokens a sample" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name a run (out/NAME)"),
        (
            ["RUN", "--mode", "mdm:steps=4", "l2r:steps=4"],
            "mode l2r:steps=4: 'steps=4' is not a setting of l2r",
        ),
        (["RUN", "--length", LENGTH + 1], f"it must be at most {LENGTH}"),
        (["ENCODER", "--mode", "speculative"], "needs causal attention"),
        (["PLAIN", "--mode", "mdm"], "plain GPT"),
        (["nowhere.jsonl"], "nowhere.jsonl: there is no such file"),
        (["BROKEN"], "line 1: this is not JSON"),
        ([[{"text": "ab", "tokens": [97, "b"]}]], "line 1"),
        ([[]], "is empty"),
    ],
)
def test_bad_arguments_are_refused(
    mistake, write, run, encoder, plain, tmp_path, arguments, message
):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    paths = {"RUN": run, "ENCODER": encoder, "PLAIN": plain, "BROKEN": broken}
    arguments = [
        write(word) if isinstance(word, list) else paths.get(word, word)
        for word in arguments
    ]
    assert message in mistake(eval_gen, *arguments, "--judge", run)


def test_what_is_no_judge_is_refused(mistake, write_texts, encoder, tmp_path):
    options = [write_texts([TEXT]), "--judge"]
    for judge, message in (
        (encoder, "is an encoder"),
        ("no-such-judge", "there is no no-such-judge"),
        (tmp_path, "supported are run folders"),
    ):
        assert message in mistake(eval_gen, *options, judge)


@pytest.mark.parametrize("judge", ["bigram", "own"])
def test_empty_samples_and_those_of_one_token_are_counted_and_said(
    script, run, bigram, tmp_path, judge
):
    """As --until-end writes them. A judge without a start token scores none of them."""
    rows = [with_ids(text) for text in ("", "a", "a cab")]
    folder = run if judge == "own" else bigram
    for name, some in (("all", rows), ("empty", rows[:1])):
        path = write_rows(tmp_path / f"{name}.jsonl", some)
        status, out, err = script(eval_gen, path, "--judge", folder)
        unscored = 1 if judge == "own" or name == "empty" else 2
        assert status == 0 and f"{unscored} of them too short to be scored" in out, err
