import json
import math

import pytest

from art_core.fast_json import read_json


def test_numbers_are_those_of_the_standard_library_to_the_last_bit() -> None:
    text = json.dumps([-0.1 - i / 7 for i in range(1000)] + [-1e-300, 5e-324, 2**63 - 1])
    assert read_json(text.encode()) == json.loads(text)


def test_nan_and_lone_surrogates_are_read_as_servers_send_them() -> None:
    nan, text = read_json(b'[NaN, "\\ud83d"]')
    assert math.isnan(nan)
    assert text == "\ud83d"


def test_what_is_not_json_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        read_json(b'{"choices": [')
