"""extras/harness.py: against the model's own log-likelihoods, enumeration, and whole
tasks through lm-evaluation-harness without network."""

import itertools
import json
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from helpers import some_slow, write_rows
from reference import DECODERS, SYSTEMS, make_system, mask_sets

import aogpt
from aogpt.checkpoints import Loaded
from aogpt.data.record_end import RecordEnd
from aogpt.data.tokenizers import get_tokenizer
from aogpt.scoring import masked_log_probs, token_log_probs

pytest.importorskip("lm_eval", reason="needs: pip install -r requirements/harness.txt")
import tokenizers  # noqa: E402
from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402

from extras import harness  # noqa: E402

BYTES = get_tokenizer("bytes")
EOT = BYTES.eot
BLOCK = 24
TEXTS = ["", "a", "the  ", "order é model", "all that was said before it, and more"]
ENDS = ["x", " step by", "twelve bytes"]
# float64 sums of tens of terms near 10; another batch shape rounds them differently
EXACT = 1e-9


def adapter(system="AO-GPT", tokenizer=BYTES, system_of=None, end=None, **options):
    """Return a `HarnessModel` of a system, or of a model."""
    model = system
    if isinstance(system, str):
        model = make_system(system, tokens=tokenizer.vocab_size, block_size=BLOCK)
    loaded = Loaded(
        model,
        "test.pt",
        0,
        "raw",
        tokenizer.name,
        tokenizer.vocab_size,
        system=system_of,
        record_end=end,
    )
    return harness.HarnessModel(aogpt.TextModel(loaded), **options)


def request(*arguments):
    return SimpleNamespace(args=arguments)


def requests_of(texts, ends):
    pairs = itertools.product(texts, ends)
    return [request(context, end) for context, end in pairs if end]


def tokens_of(context, end):
    """Return context and continuation as tokens, by the harness's conventions."""
    stripped = context.rstrip()
    context_ids = BYTES.encode(stripped)
    new = BYTES.encode(context[len(stripped) :] + end)
    return (context_ids or [EOT])[len(new) - BLOCK :], new


def left_to_right(model, context_ids, new):
    tokens = torch.tensor([context_ids + new])
    log_probs = token_log_probs(model, tokens, torch.arange(tokens.shape[1])[None])
    return float(log_probs[0, len(context_ids) :].double().sum())


def any_order(model, context_ids, new):
    """Return the mean over all orders of the continuation of its log-probability."""
    c = len(context_ids)
    n = len(new)
    tokens = torch.tensor([context_ids + new])
    rest = range(c, c + n)
    if model.config.attention == "causal":
        orders = [[*range(c), *order] for order in itertools.permutations(rest)]
        orders = torch.tensor(orders)
        log_probs = token_log_probs(model, tokens.expand(len(orders), -1), orders)
        return float(log_probs[:, c:].sum(dim=1).mean())
    given = {}  # log p(x_target | all but the masked positions)
    for subset in mask_sets(n):
        masked = torch.tensor([[p - c in subset for p in range(c + n)]])
        values = masked_log_probs(model, tokens, masked)[0]
        for target in subset:
            given[frozenset(subset), target] = float(values[c + target])
    sums = []
    for order in itertools.permutations(range(n)):
        sums.append(sum(given[frozenset(order[i:]), order[i]] for i in range(n)))
    return statistics.fmean(sums)


@pytest.mark.parametrize("system", DECODERS)
def test_left_to_right_it_is_the_sum_of_the_model_s_own_log_probabilities(system):
    lm = adapter(system)
    asked = requests_of(TEXTS, ENDS)
    for one, (value, _) in zip(asked, lm.loglikelihood(asked), strict=True):
        context_ids, new = tokens_of(*one.args)
        expected = left_to_right(lm.model, context_ids, new)
        assert value == pytest.approx(expected, abs=EXACT), one.args
    assert lm.loglikelihood([request("the", "")]) == [(0.0, True)]


@pytest.mark.parametrize("name", ["bytes", "english"])
@pytest.mark.parametrize(
    "context, end",
    [
        ("The end.<|endoftext|>The sailor", " was"),
        ("The sailor", " was<|endoftext|>"),
        ("<|endoftext|>The", " sailor"),
        ("One.<|endoftext|>", "Two"),
    ],
)
def test_end_of_text_in_a_text_is_one_token_as_where_texts_are_scored(
    name, context, end
):
    tokenizer = get_tokenizer(name)
    model = make_system("AO-GPT", tokens=tokenizer.vocab_size, block_size=48)
    lm = adapter(model, tokenizer)
    ((value, _),) = lm.loglikelihood([request(context, end)])
    (scored,) = aogpt.TextModel(lm.loaded).score([context + end])
    context_length = len(tokenizer.encode_documents(context))
    assert value == pytest.approx(sum(scored.log_probs[context_length:]), abs=EXACT)


def test_other_special_tokens_in_a_request_are_counted(monkeypatch):
    lm = adapter("AO-GPT")
    monkeypatch.setattr(lm.tokenizer, "special_tokens", ["</s>", "<|endoftext|>"])
    lm.loglikelihood([request("a</s>b</s>", "c<|endoftext|>"), request("</s>", "d")])
    assert lm.special == {"</s>": 2}


@pytest.mark.parametrize(
    "context, end",
    [
        ("The sailor had seen the whole wor", "ld"),
        ("She spoke to Doro", "thy about"),
        ("the end ", "of it"),
        ("wor", "ld"),
    ],
)
def test_a_token_across_context_and_continuation_is_scored(context, end):
    """Both are encoded together; what is scored are all tokens that reach into the
    continuation."""
    english = get_tokenizer("english")
    lm = adapter(tokenizer=english)
    tokens = english.encode(context + end)
    context_length = max(
        k
        for k in range(len(tokens))
        if context.rstrip().startswith(english.decode(tokens[:k]))
    )
    ((value, _),) = lm.loglikelihood([request(context, end)])
    context_ids = tokens[:context_length] or [english.eot]
    expected = left_to_right(lm.model, context_ids, tokens[context_length:])
    assert value == pytest.approx(expected, abs=EXACT)


def test_a_context_is_divided_as_its_tokenizer_writes_it(tmp_path):
    """A normaliser may compose a letter and its accent."""
    hub = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]
        )
    )
    hub.normalizer = tokenizers.normalizers.NFC()
    hub.pre_tokenizer = ByteLevel(add_prefix_space=False)
    hub.decoder = tokenizers.decoders.ByteLevel()
    hub.add_special_tokens(["<|endoftext|>"])
    hub.save(str(tmp_path / "tokenizer.json"))
    lm = adapter()
    lm.tokenizer = get_tokenizer(str(tmp_path / "tokenizer.json"))
    composed, decomposed = "caf\u00e9 ici.", "cafe\u0301 ici."
    assert lm._encode_pair(decomposed, " Oui") == lm._encode_pair(composed, " Oui")
    context, continuation = lm._encode_pair(decomposed, " Oui")
    assert lm.tokenizer.decode(continuation) == " Oui"


def test_greedy_needs_the_most_probable_token_of_the_tokenizer_in_every_order():
    """The padding of the token table cannot be generated, but counts in the
    probabilities."""
    model = make_system("AO-GPT", tokens=300, block_size=BLOCK)
    with torch.no_grad():
        model.head.bias[280] = 50.0
    lm = adapter(model)
    scores = [lm.score([5], [token]) for token in range(257)]
    assert [best for _, best in scores].count(True) == 1
    assert max(scores)[1]
    assert max(scores)[0] < -10
    best = max(range(257), key=lambda token: scores[token])
    other_orders = adapter(model, order="random", num_orders=8)
    of_orders = []
    for token in range(257):
        value, is_greedy = other_orders.score([5], [best, token])
        of_orders.append((value, is_greedy))
    assert sum(is_greedy for _, is_greedy in of_orders) <= 1


@pytest.mark.parametrize(
    "system",
    some_slow(
        [(name,) for name in SYSTEMS if name != "GPT-2"],
        lambda system: system in ("AO-GPT", "RADD"),
        "600 estimates of each",
    ),
)
def test_any_order_estimates_are_unbiased_given_the_context(system):
    """300 independent estimates lie around the mean over all orders within 4 standard
    errors."""
    model = make_system(system, tokens=BYTES.vocab_size, block_size=BLOCK)
    asked = [request("the ", "abc"), request("", "wxyz")]
    estimates = [[], []]
    for seed in range(300):
        lm = adapter(model, seed=seed, order="random", num_orders=2)
        for values, (value, _) in zip(estimates, lm.loglikelihood(asked), strict=True):
            values.append(value)
    for one, values in zip(asked, estimates, strict=True):
        context, end = one.args
        context_ids, new = tokens_of(context, end)
        exact = any_order(model, context_ids, new)
        error = statistics.stdev(values) / math.sqrt(len(values))
        assert error > 1e-6
        assert abs(statistics.fmean(values) - exact) < 4 * error, one.args


def test_rolling_predicts_every_token_once_in_windows_that_fit():
    lm = adapter()
    long = "It was the best of times, it was" * 3
    for text in ("", "a", "x" * (BLOCK - 1), "y" * BLOCK, long):
        (value,) = lm.loglikelihood_rolling([request(text)])
        tokens = BYTES.encode(text)
        expected = 0.0
        place = 0
        while place < len(tokens):
            end = min(place + BLOCK - 1, len(tokens))
            context_ids = ([EOT] + tokens)[max(0, end + 1 - BLOCK) : place + 1]
            expected += left_to_right(lm.model, context_ids, tokens[place:end])
            place = end
        assert value == pytest.approx(expected, abs=EXACT), text


def test_a_pretrained_model_reads_its_own_start_token_before_an_empty_context(
    monkeypatch,
):
    lm = adapter(system_of="llama")
    monkeypatch.setattr(lm.tokenizer, "starts", [1])
    tokens = BYTES.encode("abc")
    expected = left_to_right(lm.model, [], tokens)
    ((value, _),) = lm.loglikelihood([request("", "abc")])
    assert value == pytest.approx(expected, abs=EXACT)
    (value,) = lm.loglikelihood_rolling([request("abc")])
    assert value == pytest.approx(expected, abs=EXACT)


def test_greedy_generation_left_to_right():
    """One full pass of the model for each token."""
    lm = adapter("AO-GPT")
    got = lm.generate_until([request(text, {"max_gen_toks": 6}) for text in TEXTS])
    for text, answer in zip(TEXTS, got, strict=True):
        context_ids = (BYTES.encode(text) or [EOT])[6 - BLOCK :]
        new = []
        for _ in range(6):
            rows = torch.tensor(
                [context_ids + new + [t] for t in range(BYTES.vocab_size)]
            )
            order = torch.arange(rows.shape[1]).expand_as(rows)
            new.append(int(token_log_probs(lm.model, rows, order)[:, -1].argmax()))
        assert answer == BYTES.decode(new[: new.index(EOT)] if EOT in new else new)


def ascii_model(system="AO-GPT"):
    """Return a model that says little else than lower-case letters and spaces."""
    model = make_system(system, tokens=BYTES.vocab_size, block_size=BLOCK)
    with torch.no_grad():
        model.head.bias[[*range(97, 123), 32]] += 30
    return model


def test_an_answer_ends_before_the_first_stop_string_or_end_of_text():
    lm = adapter(ascii_model())
    (whole,) = lm.generate_until([request("the", {"max_gen_toks": 12})])
    assert len(whole) == 12
    stops = [whole[7:9], "\n", whole[3:5], ""]
    (cut,) = lm.generate_until([request("the", {"max_gen_toks": 12, "until": stops})])
    assert cut == whole[: min(whole.find(stop) for stop in (stops[0], stops[2]))]
    with torch.no_grad():
        lm.model.head.bias[EOT] += 1000
    assert lm.generate_until([request("the", {"max_gen_toks": 12})]) == [""]


SAMPLED = {"max_gen_toks": 9, "do_sample": True, "temperature": 0.8, "top_p": 0.95}


@pytest.mark.parametrize(
    ("system", "mode"),
    [
        ("AO-GPT", "l2r"),
        ("AO-GPT", "speculative"),
        ("AO-GPT", "confidence"),
        ("RADD", None),
        ("RADD", "even"),
    ],
)
def test_samples_depend_on_the_seed_in_every_mode(system, mode):
    model = ascii_model(system)
    asked = [request("the", SAMPLED)] * 3
    texts = adapter(model, mode=mode).generate_until(asked)
    assert [len(text) for text in texts] == [9] * 3
    assert len(set(texts)) == 3
    assert adapter(model, mode=mode).generate_until(asked) == texts
    assert adapter(model, mode=mode, seed=7).generate_until(asked) != texts


def test_what_a_model_cannot_do_is_refused_by_name():
    for system, options, words in (
        ("RADD", {"order": "l2r"}, "has no left-to-right likelihood: order random"),
        ("GPT-2", {"order": "random"}, "is a plain GPT: take order l2r and mode l2r"),
    ):
        with pytest.raises(ValueError, match=words):
            adapter(system, **options)
    with pytest.raises(ValueError, match="records whose end is given"):
        adapter(end=RecordEnd(token=BYTES.eot, lengths=(1,) * BLOCK))
    lm = adapter()
    assert len(lm.loglikelihood([request("a", "b" * (BLOCK - 1))])) == 1
    with pytest.raises(ValueError, match="120 tokens .* do not fit in a block of 24"):
        lm.loglikelihood([request("see this", "order" * BLOCK)])
    with pytest.raises(ValueError, match="24 tokens after a context do not fit"):
        lm.generate_until([request("a", {"max_gen_toks": BLOCK})])
    with pytest.raises(ValueError, match="num_beams is not supported"):
        lm.generate_until([request("a", {"num_beams": 4})])


ROWS = [
    {"text": "the mo", "choices": ["del", "xyz", "de"], "gold": 0},
    {"text": "", "choices": ["any", "zz"], "gold": 0},
    {"text": "learn predict order the ", "choices": ["block", "q"], "gold": 1},
    {"text": "step of", "choices": [" the", " the token"], "gold": 1},
]
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
"""
CHOICE = 'doc_to_choice: "{{choices}}"\ndoc_to_target: gold\ntarget_delimiter: ""\n'
CHOICE += "metric_list: [{metric: acc}]\n"
ANSWER = (
    'doc_to_target: "{{target}}"\ngeneration_kwargs: {until: [" "], max_gen_toks: 8}\n'
)
ANSWER += "metric_list: [{metric: exact_match}]\n"
ROLLING = (
    'doc_to_target: "{{text}}"\n'
    "metric_list: [{metric: byte_perplexity}, {metric: bits_per_byte}]\n"
)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Return the files of three tasks, one of each kind."""
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [row | {"target": "?"} for row in ROWS]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    files = []
    for name, kind, text, rest in (
        ("choose", "multiple_choice", "{{text}}", CHOICE),
        ("answer", "generate_until", "{{text}}", ANSWER),
        ("roll", "loglikelihood_rolling", "", ROLLING),
    ):
        task = TASK.format(name=f"tiny_{name}", kind=kind, text=text, path=path)
        file = tmp_path / f"{name}.yaml"
        file.write_text(task + rest)
        files.append(file)
    return files


def expected_results(lm):
    """Return accuracy and bits per byte of ROWS, from the adapter's log-likelihoods."""
    right = 0
    for row in ROWS:
        asked = [request(row["text"], choice) for choice in row["choices"]]
        values = [value for value, _ in lm.loglikelihood(asked)]
        right += values.index(max(values)) == row["gold"]
    texts = [row["text"] for row in ROWS]
    log_probs = lm.loglikelihood_rolling([request(text) for text in texts])
    bits = -sum(log_probs) / math.log(2)
    return right / len(ROWS), bits / sum(map(len, texts))


@pytest.mark.parametrize("order", ["l2r", "random"])
def test_tasks_of_every_kind_run_without_network(script, run, tasks, tmp_path, order):
    options = ["--tasks", *tasks, "--device", "cpu", "--order", order]
    options += ["--num-orders", 3, "--json", tmp_path / "results.json"]
    status, out, err = script(harness, run, *options)
    assert status == 0, err
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    lm = harness.HarnessModel(aogpt.load(run), order, num_orders=3)
    accuracy, bits = expected_results(lm)
    assert results["tiny_choose"]["acc,none"] == accuracy
    assert results["tiny_answer"]["exact_match,none"] == 0
    # float32, in other batches
    assert results["tiny_roll"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-6)
    assert f"log-likelihoods: {order}" in out
    assert "tiny_choose" in out
    status, _, err = script(harness, run, *options)
    assert status == 2
    assert "--overwrite" in err
