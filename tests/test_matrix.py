"""Whatever else is done to a transformer, in whatever order: does it go as it would have gone without us?

An order is a sequence of features of the host (offloads, caches, casts, adapters, see `FEATURES`) with `enable`, `disable` and
`enable` again somewhere in between. Each order runs on a tiny transformer with and without our calls, with a denoising step after
every feature. Both must fail at the same feature with the same type of error, or give the same bits at every step; the fast path
must run in every step between `enable` and `disable` and in no other; and in the end `disable` must leave the modules as if we
had never been there (`setups.anatomy`).

``python tests/test_matrix.py`` prints the summary as Markdown, with ``--json`` as JSON; ``--exhaustive`` walks all pairs and
triples in every order with every placement of the switches, 27,720 in an hour, instead of the sample that the test walks.
"""

import argparse
import collections
import itertools
import json
import logging
import os
import sys
import time
import warnings

if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")

import conftest
import pytest
import setups
import torch
from setups import CPU

import ltx2_fastpath
from ltx2_fastpath.testing import models

LORA = setups.lora(num_layers=1, targets=("to_q",))


def load_lora(pipe):
    if not getattr(pipe.transformer, "peft_config", None):
        pipe.load_lora_weights(dict(LORA), adapter_name="style")


def fuse_lora(pipe):
    load_lora(pipe)
    pipe.fuse_lora()


def unload_lora(pipe):
    load_lora(pipe)
    pipe.unload_lora_weights()


def remove_hooks(pipe):
    pipe.remove_all_hooks()
    if pipe.transformer.is_cache_enabled:
        pipe.transformer.disable_cache()


def group_offload(pipe, **options):
    pipe.transformer.enable_group_offload(onload_device=CPU, offload_device=CPU, **options)


FEATURES = {
    "sequential offload": lambda pipe: pipe.enable_sequential_cpu_offload(),
    "model offload": lambda pipe: pipe.enable_model_cpu_offload(),
    "block offload": lambda pipe: group_offload(pipe, offload_type="block_level", num_blocks_per_group=1),
    "leaf offload": lambda pipe: group_offload(pipe, offload_type="leaf_level"),
    "PAB": lambda pipe: pipe.transformer.enable_cache(setups.pab()),
    "TaylorSeer": lambda pipe: pipe.transformer.enable_cache(setups.taylorseer()),
    "layerwise casting": lambda pipe: pipe.transformer.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
    ),
    "LoRA load": load_lora,
    "LoRA fuse": fuse_lora,
    "LoRA unload": unload_lora,
    "attention backend": lambda pipe: pipe.transformer.set_attention_backend("_native_math"),
    "remove hooks": remove_hooks,
}
SWITCHES = {"enable": ltx2_fastpath.enable, "disable": ltx2_fastpath.disable}


def placements(features: int) -> list[tuple[int, ...]]:
    """Every way to place enable, then perhaps disable, then perhaps enable before, between and after so many features.

    (0, 2, 2): enable before the first feature, disable and enable again after the second.
    """
    slots = range(features + 1)
    once = [(i,) for i in slots]
    twice = [(i, j) for i in slots for j in slots if i < j]
    thrice = [(i, j, k) for i, j in twice for k in slots if j <= k]
    return once + twice + thrice


def orders(exhaustive: bool = False) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """The orders to walk, as (features, placement).

    Exhaustive: all pairs and triples of features, in every order, with every placement. The sample has all pairs in both orders
    with two placements each, and all triples in one order with one placement each, taken in turn.
    """
    if exhaustive:
        sequences = [features for size in (2, 3) for features in itertools.permutations(FEATURES, size)]
        return [(features, placement) for features in sequences for placement in placements(len(features))]
    found = []
    for number, features in enumerate(itertools.permutations(FEATURES, 2)):
        found += [(features, placements(2)[(2 * number + i) * 7 % 10]) for i in range(2)]
    for number, features in enumerate(itertools.combinations(FEATURES, 3)):
        ordered = list(itertools.permutations(features))[number % 6]
        found.append((ordered, placements(3)[number * 7 % 20]))
    return found


class Run:
    """One transformer, set up feature by feature; what came of it.

    Attributes:
        outputs: (video, audio) of the denoising step after each feature, and of two more in the end.
        error: (step that raised, type of the error), or None.
        anatomy: what the modules look like in the end.
        complaints: steps in which the fast path did not run though it was enabled, or ran though it was not.
    """

    def __init__(self, features, placement=(), launches=None):
        self.outputs, self.error, self.complaints = [], None, []
        self._pipe = setups.pipeline_of(setups.tiny(num_layers=1))  # one layer: the time goes into modules and calls
        self._inputs = models.inputs(self._pipe.transformer, **setups.SMALL)
        self._launches = launches
        self._enabled = False
        self._guarded(self._set_up, features, placement)
        self._at = "the end"
        if placement:
            ltx2_fastpath.disable(self._pipe)
            self._enabled = False
        if self.error is None:
            self._guarded(self._step)
        self.anatomy = setups.anatomy(self._pipe.transformer)

    def _set_up(self, features, placement):
        for slot, feature in enumerate((*features, None)):
            self._switch(placement.count(slot))
            if feature is not None:
                self._at = feature
                FEATURES[feature](self._pipe)
            self._step()

    def _guarded(self, act, *args):
        try:
            act(*args)
        except Exception as error:
            self.error = self._at, type(error)

    def _switch(self, times):
        for _ in range(times):
            switch = "disable" if self._enabled else "enable"
            SWITCHES[switch](self._pipe)
            self._enabled = not self._enabled

    def _step(self):
        before = None if self._launches is None else self._launches.total()
        self.outputs.append(setups.run(self._pipe.transformer, **self._inputs))
        if before is not None and (self._launches.total() > before) != self._enabled:
            self.complaints.append(f"after {self._at}: {self._launches.total() - before} launches, enabled: {self._enabled}")


def compare(without: Run, with_us: Run) -> list[str]:
    """How the two runs differ; empty if they do not."""
    if with_us.error != without.error:
        return [f"without us {without.error or 'no error'}, with us {with_us.error or 'no error'}"]
    found = list(with_us.complaints)
    for number, (stock, ours) in enumerate(zip(without.outputs, with_us.outputs)):
        if not setups.equal(stock, ours):
            found.append(f"step {number} gives other values")
    return found + setups.differences(without.anatomy, with_us.anatomy)[:3]


def walk(launches, exhaustive: bool = False) -> dict:
    """Walk the orders. -> the summary: how many were tried, failed without us, failed with us, and what differed."""
    without = {}
    summary = {"orders": 0, "pairs": 0, "triples": 0, "failures without us": 0, "failures with us": 0}
    summary |= {"steps compared": 0, "differences": [], "errors": collections.Counter()}
    for features, placement in orders(exhaustive):
        if features not in without:
            with setups.attention_backend_of_its_own():
                without[features] = Run(features)
        with setups.attention_backend_of_its_own():
            ours = Run(features, placement, launches)
        stock = without[features]
        summary["orders"] += 1
        summary["pairs" if len(features) == 2 else "triples"] += 1
        summary["failures without us"] += stock.error is not None
        summary["failures with us"] += ours.error is not None
        summary["steps compared"] += min(len(stock.outputs), len(ours.outputs))
        if stock.error is not None:
            summary["errors"][f"{stock.error[0]}: {stock.error[1].__name__}"] += 1
        if found := compare(stock, ours):
            summary["differences"].append({"order": describe(features, placement), "found": found})
    return summary


def describe(features, placement) -> str:
    words, enabled = [], False
    for slot, feature in enumerate((*features, None)):
        for _ in range(placement.count(slot)):
            words.append("disable" if enabled else "enable")
            enabled = not enabled
        words += [feature] if feature else []
    return " → ".join(words)


@pytest.fixture
def quiet():
    """The host warns at each offload, cast and cache."""
    level = logging.getLogger("diffusers").level
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.getLogger("diffusers").setLevel(level)


@pytest.mark.usefixtures("any_width", "quiet")
def test_every_order_goes_as_it_would_without_us(stand_ins):
    summary = walk(stand_ins)
    print(markdown(summary))
    assert summary["differences"] == []
    assert summary["failures with us"] <= summary["failures without us"] < summary["orders"]
    assert summary["orders"] == len(orders())


def markdown(summary: dict) -> str:
    rows = [(name, value) for name, value in summary.items() if not isinstance(value, (list, dict))]
    rows += [("differences with us", len(summary["differences"]))]
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    lines += [f"- {count} × {error}, with us as without" for error, count in summary["errors"].most_common()]
    lines += [f"- **{found['order']}**: {'; '.join(found['found'])}" for found in summary["differences"]]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exhaustive", action="store_true", help="every order with every placement")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch:
        started = time.perf_counter()
        conftest.refuse_nothing(patch)
        summary = walk(conftest.replace_kernels(patch), arguments.exhaustive)
        summary["seconds"] = round(time.perf_counter() - started)
    print(json.dumps(summary, indent=2) if arguments.json else markdown(summary))
    sys.exit(bool(summary["differences"]))
