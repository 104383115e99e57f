"""The batch table: columns do not overlap, and parameters arrive as they were written."""

from __future__ import annotations

import os

import numpy as np
import pytest

from slipring.shm.params import MAX_STOP_TOKEN_IDS, SamplingParams
from slipring.shm.segment import Segment
from slipring.shm.table import BatchTable, TableShape

SHAPE = TableShape(num_rows=5, max_model_len=33, block_size=8)


def test_columns_do_not_overlap() -> None:
    table = BatchTable.create(SHAPE)
    columns = [getattr(table, name) for name, _, _ in SHAPE.columns()]
    for value, column in enumerate(columns, 1):
        column[...] = value
    for value, column in enumerate(columns, 1):
        assert (column == value).all()
    assert SHAPE.max_blocks == 5


def test_parameters_reach_the_other_side() -> None:
    table = BatchTable.create(SHAPE)
    other = BatchTable(Segment.attach(os.dup(table.segment.fd), SHAPE.nbytes), SHAPE)
    params = SamplingParams(
        max_tokens=3, temperature=0.5, seed=2**64 - 1, stop_token_ids=(4, 9), logit_bias=((1, -100.0), (7, 2.5))
    )
    table.write_params(2, params)
    assert other.temperature[2] == np.float32(0.5) and int(other.seed[2]) == 2**64 - 1
    assert other.stop_ids[2, : other.num_stop_ids[2]].tolist() == [4, 9]
    assert other.bias_ids[2, : other.num_bias[2]].tolist() == [1, 7]
    assert other.bias_values[2, :2].tolist() == [-100.0, 2.5]
    table.write_params(2, SamplingParams(max_tokens=1))
    assert other.num_stop_ids[2] == 0 and other.num_bias[2] == 0


def test_a_list_longer_than_its_column_is_refused() -> None:
    table = BatchTable.create(SHAPE)
    with pytest.raises(ValueError, match="room for"):
        table.write_params(0, SamplingParams(max_tokens=1, stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS + 1))))
