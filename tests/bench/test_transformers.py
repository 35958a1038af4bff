"""What `python -m bench.transformers` takes for memory, the lengths it draws and the batches it really runs."""

import pytest
import torch

from bench.transformers.bins import Asked, counted, gang_batches
from bench.transformers.decode import Decodes
from bench.transformers.lengths import PUBLISHED, published
from bench.transformers.memory import Peak, largest_batch
from deployments.config.model import DEMO_MODEL
from deployments.engines.transformers.model import GangModel, load
from policies.gang.prefill import PrefillConfig

_MIB = 1 << 20


def test_a_peak_outlives_what_made_it_until_it_is_counted_anew() -> None:
    peak = Peak(torch.device("cpu"))
    del_me = torch.ones(64 * _MIB // 4)
    del del_me
    assert peak.bytes() >= 60 * _MIB
    peak.again()
    assert peak.bytes() < 32 * _MIB


@pytest.mark.parametrize(("most_bytes", "found"), [(7, 0), (8, 2), (40, 8), (64, 16)])
def test_the_largest_batch_is_the_last_doubling_that_memory_holds(most_bytes: int, found: int) -> None:
    asked: list[int] = []

    def peak_bytes(size: int) -> int:
        asked.append(size)
        return 4 * size

    assert largest_batch(peak_bytes, most_bytes, first=2) == found
    assert asked == [2 << n for n in range(len(asked))], "nothing is tried twice"


def test_packed_rows_of_one_long_and_nine_short_requests_take_less_memory() -> None:
    model = load(str(DEMO_MODEL), dtype="float32")
    held = Decodes(model, GangModel(model, PrefillConfig())).memory([1] * 9 + [1000], steps=2)
    assert held["packed_bytes"] < 0.5 * held["padded_bytes"]


def test_gangs_by_bin_take_fewer_steps_and_lose_no_request() -> None:
    asked = [Asked([1], tokens, tokens) for tokens in (5, 200, 7, 190, 6, 210, 8, 180)]
    seen = [each.output_tokens for each in asked]
    one, two = (counted(list(gang_batches(asked, seen, bins, batch_size=4))) for bins in (1, 2))
    assert one["requests"] == two["requests"] == len(asked)
    assert two["s"] < one["s"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_lengths_have_the_least_mean_and_longest_of_table_2_of_004(name: str) -> None:
    least, mean, longest = PUBLISHED[name]
    drawn = published(name, 5000, 0)
    assert least <= drawn.min() and drawn.max() <= longest
    assert drawn.mean() == pytest.approx(mean, rel=0.05)
