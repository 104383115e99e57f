"""`--speculative-config`: what is taken, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipring.runtime.speculation import (
    SpeculationError,
    draft_depth,
    draft_widths,
    parse_speculation,
    worker_speculation,
)


def test_defaults_and_vllms_rules_for_the_sizes() -> None:
    plain = parse_speculation('{"method": "ngram"}')
    assert draft_widths(plain, 3) == (0, 5, 5, 5)
    assert draft_widths(plain, 64)[8:10] == (5, 2) and set(draft_widths(plain, 64)[33:]) == {0}
    spec = worker_speculation(plain)
    assert (spec.method, spec.prompt_lookup_min, spec.prompt_lookup_max) == ("ngram", 2, 5)
    one = worker_speculation(parse_speculation('{"method": "ngram", "prompt_lookup_max": 4}'))
    assert (one.prompt_lookup_min, one.prompt_lookup_max) == (4, 4)
    assert parse_speculation('{"model": "ngram"}').method == "ngram"


def test_suffix_decoding_has_vllms_defaults() -> None:
    plain = parse_speculation('{"method": "suffix"}')
    spec = worker_speculation(plain)
    assert (spec.suffix_depth, spec.suffix_requests, spec.suffix_factor, spec.suffix_token_prob) == (24, 10_000, 1, 0.1)
    assert draft_widths(plain, 2) == (0, 23, 23)
    text = '{"method": "suffix", "suffix_decoding_max_cached_requests": 0, "num_speculative_tokens": 3}'
    off = parse_speculation(text)
    assert max(draft_widths(parse_speculation('{"method": "grammar"}'), 1)) == 16
    assert worker_speculation(off).suffix_requests == 0 and draft_widths(off, 1) == (0, 3)


def test_widths_by_batch_size() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": %s}'
    ranges = "[[1, 2, 9], [4, 5, 2], [6, 6, 0]]"
    # Gaps and the tail go on as before, and nothing is above num_speculative_tokens.
    assert draft_widths(parse_speculation(text % ranges), 8) == (0, 4, 4, 4, 2, 2, 0, 0, 0)
    for wrong in ("[[2, 3, 1]]", "[[1, 4, 1], [4, 5, 1]]", "[[1, 0, 1]]", "[[1, 2, -1]]", "[]"):
        with pytest.raises(SpeculationError, match="num_speculative_tokens_per_batch_size"):
            draft_widths(parse_speculation(text % wrong), 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
        ("{}", "method must be one of"),
        ('{"method": "ngramm"}', "method must be one of ngram"),
        ('{"method": "ngram", "num_speculative_token": 3}', "did you mean 'num_speculative_tokens'"),
        ('{"method": "ngram", "xyzzy": 3}', "known are"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": "5"}', 'num_speculative_tokens must be an integer, got "5"$'),
        ('{"method": "ngram", "adaptive": 1}', "adaptive must be true or false, got 1$"),
        ('{"method": ["ngram"]}', r'method must be a text, got \["ngram"\]$'),
        ('{"method": "eagle", "speculative_token_tree": 3}', "speculative_token_tree must be a text or a list, got 3$"),
        (
            '{"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 2, 3], [4, 5]]}',
            r"num_speculative_tokens_per_batch_size\[1\] must be a list of 3, got \[4,5\]$",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 2, null]]}',
            r"num_speculative_tokens_per_batch_size\[0\]\[2\] must be an integer, got null$",
        ),
        ('{"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 2}', "must not be above"),
        ('{"method": "ngram", "prompt_lookup_min": 0}', "prompt_lookup_min"),
        ('{"method": "ngram", "model": "x"}', "model"),
        ('{"method": "suffix", "model": "x"}', "suffix needs none"),
        ('{"method": "grammar", "model": "x"}', "grammar needs none"),
        ('{"method": "draft_model"}', "model must be the draft model"),
        (
            '{"method": "ngram", "rejection_sample_method": "standard"}',
            "rejection_sample_method is for draft_model",
        ),
        ('{"method": "draft_model", "rejection_sample_method": "block"}', "rejection_sample_method may be 'standard'"),
        ('{"method": "draft_model", "rejection_sample_method": true}', "rejection_sample_method"),
        ('{"method": "suffix", "prompt_lookup_max": 3}', "prompt_lookup_max belongs to method ngram"),
        ('{"method": "ngram", "suffix_decoding_max_tree_depth": 3}', "belongs to method suffix"),
        ('{"method": "suffix", "suffix_decoding_tree_depth": 3}', "did you mean 'suffix_decoding_max_tree_depth'"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 1}', "suffix_decoding_max_tree_depth must be from 2"),
        ('{"method": "suffix", "suffix_decoding_max_cached_requests": -1}', "max_cached_requests must be 0 or more"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": -0.5}', "max_spec_factor must be 0 or more"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 1.5}', "min_token_prob must be from 0 to 1"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(SpeculationError, match=words):
        parse_speculation(text)


def test_trees() -> None:
    given = parse_speculation('{"method": "ngram", "num_speculative_tokens": 4, "num_draft_tree_tokens": 12}')
    assert draft_widths(given, 3) == (0, 12, 12, 12) and draft_depth(given) == 4
    assert worker_speculation(given).tree_depth == 4 and worker_speculation(given).adaptive
    assert not worker_speculation(parse_speculation('{"method": "ngram", "adaptive": false}')).adaptive
    assert worker_speculation(parse_speculation('{"method": "ngram", "num_speculative_tokens": 4}')).tree_depth is None


@pytest.mark.parametrize("tree", ["[[0, 0], [1], [0]]", '"[(1,), (0,), (0, 0)]"'], ids=["a list", "vLLM's string"])
def test_a_fixed_tree(tmp_path: Path, tree: str) -> None:
    (tmp_path / "model.safetensors").touch()
    text = f'{{"method": "eagle", "model": "{tmp_path}", "speculative_token_tree": {tree}%s}}'
    given = parse_speculation(text % "")
    assert worker_speculation(given).token_tree == ((0,), (1,), (0, 0))
    assert draft_widths(given, 1) == (0, 3) and draft_depth(given) == 2
    for number in (2, 3):  # its depth, or, as vLLM counts, its drafts
        assert parse_speculation(text % f', "num_speculative_tokens": {number}')
    with pytest.raises(SpeculationError, match="num_speculative_tokens is 4"):
        parse_speculation(text % ', "num_speculative_tokens": 4')
    with pytest.raises(SpeculationError, match="exclude each other"):
        parse_speculation(text % ', "num_draft_tree_tokens": 4')


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("[]", "must be a list of paths"),
        ('"[(0,)"', "cannot be read"),
        ('"5"', "must be a list of paths"),
        ("[[0], []]", "is no path"),
        ("[[0], [-1]]", "is no path"),
        ("[[0], [0]]", "twice"),
        ("[[0], [1, 0]]", r"has no parent: add \[1\]"),
        (str([[i] for i in range(32)] + [[0, i] for i in range(31)]), "at most 62"),
    ],
)
def test_what_is_wrong_with_a_tree_is_named(tmp_path: Path, tree: str, words: str) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SpeculationError, match=f"speculative_token_tree.*{words}"):
        parse_speculation(f'{{"method": "eagle", "model": "{tmp_path}", "speculative_token_tree": {tree}}}')


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ('"method": "suffix", "num_draft_tree_tokens": 9', "num_draft_tree_tokens is for ngram, eagle, medusa"),
        ('"method": "ngram", "num_draft_tree_tokens": 63', "num_draft_tree_tokens must be from 1 to 62"),
        ('"method": "ngram", "speculative_token_tree": [[0]]', "speculative_token_tree is for eagle and medusa"),
    ],
)
def test_trees_where_there_are_none(keys: str, words: str) -> None:
    with pytest.raises(SpeculationError, match=words):
        parse_speculation(f"{{{keys}}}")


def test_rejection_sampling_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    text = f'{{"method": "eagle", "model": "{tmp_path}"%s}}'
    asked = text % ', "rejection_sample_method": %s'
    for given, expected in ((text % "", False), (asked % "null", False), (asked % '"standard"', True)):
        assert worker_speculation(parse_speculation(given)).rejection_sampling == expected
    for tree in ('"num_draft_tree_tokens": 9', '"speculative_token_tree": [[0]]'):
        with pytest.raises(SpeculationError, match="rejection_sample_method is for chains"):
            parse_speculation(text % f', "rejection_sample_method": "standard", {tree}')


def test_eagle3_is_eagle(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    config = parse_speculation(f'{{"method": "eagle3", "model": "{tmp_path}"}}')
    assert config.method == "eagle"


@pytest.mark.parametrize(
    ("method", "said", "other"),
    [("medusa", '{"method": "eagle"}', "eagle"), ("eagle", '{"medusa_num_heads": 3}', "medusa")],
)
def test_a_head_for_another_method_is_told_before_anything_loads(
    tmp_path: Path, method: str, said: str, other: str
) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(said)
    with pytest.raises(SpeculationError, match=f"method is {method}, but the head in .* is one for {other}"):
        parse_speculation(f'{{"method": "{method}", "model": "{tmp_path}"}}')
    assert parse_speculation(f'{{"method": "{other}", "model": "{tmp_path}"}}').method == other
