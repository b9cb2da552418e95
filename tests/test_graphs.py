"""CUDA graphs without CUDA: when is one captured, replayed, captured again or refused?

A stand-in for torch's graphs runs the captured call again at each replay, on the inputs it was captured with, as a graph would.
"""

import contextlib

import pytest
import torch
from ltx2_fastpath.patches.transformer import graphs
from ltx2_fastpath.patches.transformer.host import ROPES

import ltx2_fastpath
from ltx2_fastpath.testing import models

SIZE = dict(height=64, width=96, num_frames=9, text_tokens=16)


class StandInGraph:
    """Repeats a call, and writes what it returns where the first time's outputs were."""

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1
        for kept, new in zip(self.outputs, self.call(), strict=True):
            kept.copy_(new)


@pytest.fixture
def captured(monkeypatch):
    """The stand-in graphs in the order in which they were captured; capturing raises while `captured.error` is set."""

    class Captured(list):
        error = None

    made = Captured()
    capturing = []

    @contextlib.contextmanager
    def capture(graph, **options):
        if made.error is not None:
            raise made.error
        capturing.append(graph)
        made.append(graph)
        try:
            yield
        finally:
            capturing.pop()

    forward = graphs.Graphs.forward

    def recorded(self, fast, transformer, survey, arguments, stock):
        def call(**kwargs):
            outputs = stock(**kwargs)
            if capturing:
                capturing[-1].masks = sum(kwargs[name] is not None for name in kwargs if name.endswith("encoder_attention_mask"))
                capturing[-1].outputs, capturing[-1].call = outputs, lambda: stock(**kwargs)
            return outputs

        return forward(self, fast, transformer, survey, arguments, call)

    monkeypatch.setattr(graphs.Graphs, "forward", recorded)
    monkeypatch.setattr(graphs, "_why_not", lambda arguments: None)
    monkeypatch.setattr(graphs, "_undone_on_failure", contextlib.nullcontext)
    monkeypatch.setattr(graphs, "_on_gpu", lambda value: isinstance(value, torch.Tensor) and value.numel() > 1)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandInGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return made


@pytest.fixture
def fast(stand_ins, any_width):
    transformer = models.tiny_transformer("2.3")
    ltx2_fastpath.enable(transformer, cuda_graphs=True)
    yield transformer
    ltx2_fastpath.disable(transformer)


NEW = "a kind of forward that had not been seen before"


def site(transformer):
    return ltx2_fastpath.enable(transformer, cuda_graphs=True).sites["cuda_graphs"]


@torch.no_grad()
def check(transformer, kwargs):
    """A forward, which must be the stock one bit for bit."""
    outputs = transformer(**kwargs)
    with ltx2_fastpath.disabled(transformer):
        assert all(map(torch.equal, outputs, transformer(**kwargs)))
    return outputs


def test_third_forward_of_a_kind_is_replayed_with_its_own_inputs(fast, captured):
    kwargs = models.inputs(fast, **SIZE, batch_size=2)
    outputs = []
    for step in range(5):
        other = models.inputs(fast, **SIZE, batch_size=2, seed=step)
        kwargs |= {name: other[name] for name in ("hidden_states", "audio_hidden_states", "encoder_hidden_states")}
        kwargs |= {name: kwargs[name] * 0.9 for name in ("timestep", "sigma")}
        outputs.append(check(fast, kwargs)[0])
    assert not any(torch.equal(a, b) for a, b in zip(outputs, outputs[1:]))
    assert len(captured) == 1 and (site(fast).stock, site(fast).fast) == (2, 3)
    assert captured[0].replays == 4  # one of them, on other latents, proved the graph


def test_outputs_are_the_callers_own(fast, captured):
    kwargs = models.inputs(fast, **SIZE, batch_size=2)
    for _ in range(3):
        check(fast, kwargs)
    first = check(fast, kwargs)
    kept = [output.clone() for output in first]
    check(fast, kwargs | dict(hidden_states=kwargs["hidden_states"] * 2))
    assert all(map(torch.equal, first, kept))


def test_guidance_passes_have_graphs_of_their_own(fast, captured):
    for guidance in ("cfg", "stg", "isolated"):
        for _ in range(3):
            check(fast, models.inputs(fast, **SIZE, batch_size=2, guidance=guidance))
    assert len(captured) == 3 and site(fast).fast == 3


def test_qualities_have_graphs_of_their_own(fast, captured):
    """Without its masks a forward is another kind; going back and forth captures nothing again."""
    kwargs = models.inputs(fast, **SIZE, batch_size=2)
    with torch.no_grad():
        for quality in ("lossless", "high", "lossless", "high"):
            with ltx2_fastpath.quality(fast, quality):
                for _ in range(3):
                    fast(**kwargs)
    assert len(captured) == 2 and site(fast).fast == 2 * 1 + 2 * 3
    assert [graph.masks for graph in captured] == [2, 0]
    check(fast, kwargs)


def test_return_dict(fast, captured):
    kwargs = models.inputs(fast, **SIZE, batch_size=2) | dict(return_dict=True)
    with torch.no_grad():
        outputs = [fast(**kwargs) for _ in range(3)]
    assert site(fast).fast == 1 and type(outputs[0]) is type(outputs[2])
    assert torch.equal(outputs[0].sample, outputs[2].sample) and torch.equal(outputs[0].audio_sample, outputs[2].audio_sample)


def test_other_coordinates_are_another_graph(fast, captured):
    kwargs = models.inputs(fast, **SIZE, batch_size=2)
    for _ in range(3):
        check(fast, kwargs)
    for _ in range(3):
        check(fast, kwargs | dict(video_coords=kwargs["video_coords"] * 0.5))
    assert len(captured) == 2 and site(fast).fast == 2


def replace_weight(transformer):
    projection = transformer.transformer_blocks[1].attn1.to_v
    projection.weight = torch.nn.Parameter(projection.weight * 2, requires_grad=False)


def replace_processor(transformer):
    transformer.transformer_blocks[0].attn1.set_processor(type(transformer.transformer_blocks[0].attn1.processor)())


def replace_module(transformer):
    old = transformer.transformer_blocks[0].ff.net[2]
    new = torch.nn.Linear(old.in_features, old.out_features).requires_grad_(False)
    transformer.transformer_blocks[0].ff.net[2] = new


@pytest.mark.parametrize("change", [replace_weight, replace_processor, replace_module])
def test_what_is_baked_in_and_changes_is_captured_again(fast, captured, change):
    kwargs = models.inputs(fast, **SIZE, batch_size=2)
    for _ in range(3):
        check(fast, kwargs)
    change(fast)
    for _ in range(2):
        check(fast, kwargs)
    assert len(captured) == 2 and any("captured again" in note for note in site(fast).notes)


def test_oldest_graph_is_dropped(fast, captured, monkeypatch):
    monkeypatch.setattr(graphs, "LIMIT", 2)
    for batch_size in (1, 2, 3, 1):
        for _ in range(3):
            check(fast, models.inputs(fast, **SIZE, batch_size=batch_size))
    assert len(captured) == 4 and site(fast).notes[0].startswith("2 graphs")


def test_a_capture_that_fails_is_not_tried_again(fast, captured):
    captured.error = RuntimeError("operation not permitted when stream is capturing")
    kwargs = models.inputs(fast, **SIZE, batch_size=2)
    for _ in range(4):
        check(fast, kwargs)
    assert site(fast).fast == 0 and site(fast).stock == 4
    assert site(fast).notes == [NEW, "capture failed: RuntimeError: operation not permitted when stream is capturing"]


def test_a_replay_with_other_bits_is_refused(fast, captured, monkeypatch):
    replay = StandInGraph.replay

    def wrong(self):
        replay(self)
        self.outputs[0][0, 0, 0] += 1

    monkeypatch.setattr(StandInGraph, "replay", wrong)
    kwargs = models.inputs(fast, **SIZE, batch_size=2)
    for _ in range(4):
        check(fast, kwargs)
    assert site(fast).fast == 0 and site(fast).notes == [NEW, "the replay gave other bits than the eager forward"]


def test_hooks_keep_the_forward_eager(fast, captured):
    fast.transformer_blocks[0].register_forward_hook(lambda module, args, output: None)
    for _ in range(3):
        check(fast, models.inputs(fast, **SIZE, batch_size=2))
    assert not captured and "watches a LTX2VideoTransformerBlock" in site(fast).notes[0]


def test_switching_graphs_off_drops_them(fast, captured):
    for _ in range(3):
        check(fast, models.inputs(fast, **SIZE, batch_size=2))
    handle = ltx2_fastpath.enable(fast, cuda_graphs=False)
    assert handle.sites["cuda_graphs"].notes == []
    check(fast, models.inputs(fast, **SIZE, batch_size=2))
    assert handle.sites["cuda_graphs"].fast == 1


def test_a_server_that_takes_three_sizes_in_turn_replays_each_and_stays_flat(fast, captured):
    """Every request makes its coordinates anew, as pipelines do; two passes of three steps each."""
    shapes = [dict(SIZE), SIZE | dict(height=32), SIZE | dict(num_frames=17)]
    kept = []
    for request in range(12):
        before = site(fast).fast
        with torch.no_grad():
            for guidance in ("cfg", "stg") * 3:
                fast(**models.inputs(fast, **shapes[request % 3], batch_size=2, guidance=guidance, seed=request))
        replayed = site(fast).fast - before
        assert replayed == (6 if request >= 3 else 2), request  # the first request sees and captures each of its two kinds
        handle = ltx2_fastpath.enable(fast)
        tables = sum(handle.sites[f"{name}.tables"].first for name in ROPES)
        kept.append((len(captured), len(site(fast)._graphs), len(site(fast)._seen), tables))
    assert kept[2:] == [kept[2]] * 10 and kept[2][:3] == (6, 6, 6)
    check(fast, models.inputs(fast, **shapes[0], batch_size=2))
