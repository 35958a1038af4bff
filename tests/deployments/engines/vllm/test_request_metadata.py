from typing import Any

import pytest

from deployments.engines.vllm.request_metadata import NOTHING, RequestMetadata, metadata_of, without_metadata


def test_what_was_told_comes_back() -> None:
    told = RequestMetadata(slo_class="fast", predicted_output_tokens=80.5, bin_index=2, ttft_left_s=17.25, resumed=True)
    assert metadata_of({"other": 1} | told.as_extra_args()) == told


@pytest.mark.parametrize("extra_args", [None, {}, {"sluice": 1}, {"sluice": "x"}, {"sluice": {"bin_index": "two"}}])
def test_what_cannot_be_read_counts_as_missing(extra_args: dict[str, Any] | None) -> None:
    assert metadata_of(extra_args) == NOTHING


def test_flat_values_of_a_client_cannot_claim_a_class() -> None:
    assert metadata_of({"sluice": ["slo_class", "fast"]}) == NOTHING


def test_the_clients_own_arguments_stay() -> None:
    assert without_metadata(NOTHING.as_extra_args()) is None
    assert without_metadata({"mine": 1} | NOTHING.as_extra_args()) == {"mine": 1}
