"""results/pretrained.md is made of results/pretrained.json."""

import json
import re

from helpers import ROOT

from studies import pretrained, pretrained_page

ROWS = ROOT / "results" / "pretrained.json"


def test_the_page_is_what_the_rows_say():
    rows = json.loads(ROWS.read_text())
    page = (ROOT / "results" / "pretrained.md").read_text()
    assert pretrained_page.page(rows) == page


def test_the_rows_name_no_folder_of_a_machine():
    assert '"/' not in ROWS.read_text()
    assert " /" not in ROWS.read_text()
    report = {
        "rows": [{"run": "/a/b", "tokenizer": "T of /a/b/c"}],
        "checkpoints": {"/a/c.bin": 1},
        "n": [1, "x/y", "and/or, a / b"],
    }
    assert pretrained.without_folders(report) == {
        "rows": [{"run": "b", "tokenizer": "T of c"}],
        "checkpoints": {"c.bin": 1},
        "n": [1, "x/y", "and/or, a / b"],
    }


def test_the_audit_has_the_numbers_of_the_rows():
    rows = json.loads(ROWS.read_text())
    front = (ROOT / "results" / "audit.md").read_text()
    (l2r, random) = [row["nll"] for row in rows["a3_one"]["differences"]]
    assert f"{-random['difference']:.3f} ± {random['half_width_95']:.3f} nats" in front
    assert f"{l2r['difference']:.3f} ± {l2r['half_width_95']:.3f} ahead" in front
    assert f"trained on {pretrained_page.tokens_of(rows):,} tokens is not" in front
    assert not pretrained_page.fills_better(rows)


def test_the_page_of_speculation_has_the_numbers_of_the_rows():
    rows = json.loads(ROWS.read_text())
    table = pretrained_page.speculation(rows)
    text = (ROOT / "results" / "findings" / "E38.md").read_text()
    (sentence,) = re.findall(r"\*\*A pretrained decoder that learns.*", text)
    assert f"for {rows['speculation_unigram']['nats']:.3f}" in sentence
    for line in re.findall(r"^\| [\d,]+ .*", table, re.M):
        tokens, loss, passes, _ = (cell.strip() for cell in line.split("|")[1:-1])
        if tokens == "102,400":  # between the others
            continue
        assert passes in sentence
        assert loss.split()[0] in sentence
        assert tokens == "0" or f"after {tokens}" in sentence


def test_what_is_missing_is_named_as_not_run():
    rows = json.loads(ROWS.read_text())
    rows["starts"].pop("s_two")
    rows.pop("fill_adapter", None)
    page = pretrained_page.page(rows)
    _, missing = page.split("## Not run")
    assert "the start: two streams" in missing
    assert "the ten sentences with the adapter" in missing


def test_last_words_have_intervals_and_are_compared_passage_by_passage():
    rows = {
        "lambada_part": {
            "log_prob": [-1.0, -2.0, -3.0, -2.0],
            "right": [True, False] * 2,
        },
        "lambada_hf": {"log_prob": [-1.0, -2.5], "right": [True, True]},
        "lambada_both": {"right": [True, True, True, False]},
    }
    rows["lambada_ours"] = rows["lambada_part"]
    text = pretrained_page.lambada(rows)
    # mean 2, sample deviation 0.816: exp(2 ± 1.96 * 0.408)
    assert "0.500 ± 0.490" in text
    assert "7.39 (3.3 to 16.4)" in text
    assert "agree on 1 of 2 words; log p differs by at most 5.0e-01" in text
    assert "changes the accuracy by +0.250 ± 0.490" in text
    assert "4 of 5,153" in pretrained_page.not_run(rows | {"starts": {}})


def test_starts_are_compared_over_the_steps_that_all_have():
    def run(losses):
        return {
            "losses": losses,
            "grad_norms": [1.0],
            "tokens_a_step": 1024,
            "lr": 2e-4,
            "lora_rank": 0,
        }

    runs = {"s_exact": run([4.0, 2.0, 6.0]), "s_target": run([8.0])}
    text = pretrained_page.starts({"starts": runs})
    assert "step 1 | steps 2 to 3" in text.replace("  ", "")
    (row,) = [
        line for line in text.splitlines() if line.startswith("| at the target  ")
    ]
    assert "8.000" in row
    assert "not run" in row


def test_the_verdict_on_infilling_is_that_of_its_interval():
    def report(nll):
        both = {"given": "both", "nll": nll, "rouge_1": [0.1, 0.2, 0.3]}
        both |= {"documents": [0, 1, 2], "draws": 16}
        both["effective_sample_size"] = [1.0, 2.5, 9.0]
        left = {"given": "left", "nll": [2.0, 2.0, 2.0], "documents": [0, 1, 2]}
        return {"rows": [left, both]}

    shipped = "no adapter comes with the clone"
    words = {
        "lambada_both": {"right": [True, True, False]},
        "lambada_adapter_both": {"right": [False, True, False]},
    }
    worse = words | {
        "infill_plain": report([1.0, 1.0, 1.0]),
        "infill_adapter": report([3.0, 3.1, 3.0]),
    }
    text = pretrained_page.verdict(worse)
    assert "is not shown to fill in better" in text
    assert "of its 16 draws is 2.5" in text
    assert "2 of 3 right against 1 of 3" in pretrained_page.so_shipped(worse)
    assert shipped in pretrained_page.so_shipped(worse)
    better = words | {
        "infill_plain": worse["infill_adapter"],
        "infill_adapter": worse["infill_plain"],
    }
    assert "**The adapter fills in better" in pretrained_page.verdict(better)
    assert not pretrained_page.so_shipped(better)


def test_the_right_side_is_worth_what_a_sentence_costs_less_with_it():
    def report(step, left, both):
        documents = [0, 1, 2]
        rows = [
            {"given": "left", "nll": left, "documents": documents},
            {"given": "both", "nll": both, "documents": documents},
        ]
        return {"checkpoints": {"run": {"step": step}}, "rows": rows}

    rows = {
        "long": {"tokens_a_step": 1000},
        "infill_uniform": report(2, [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]),
        "infill_adapter_early": report(2, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        "infill_adapter": report(6, [2.0, 3.0, 4.0], [1.5, 2.5, 3.5]),
    }
    text = re.sub(" +", " ", pretrained_page.worth_of_right_side(rows))
    assert "| books | uniform orders | 2,000 | -1.000 ± 0.000 |" in text
    assert "| books | infilling orders | 6,000 | +0.500 ± 0.000 |" in text
