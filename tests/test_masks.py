"""Quality "high": text masks that mask nothing are dropped, for that request only, and lossless requests keep every bit."""

import gc
import threading
import weakref

import pytest
import setups
import torch
from diffusers.models.transformers import transformer_ltx2

import ltx2_fastpath
from ltx2_fastpath.testing import models

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("stand_ins", "any_width", "masked")]
MASKS = ("encoder_attention_mask", "audio_encoder_attention_mask")


@pytest.fixture
def masked(monkeypatch):
    """How many attentions were given a mask, and how many were not, since the last look: masked() -> (with, without).

    Text attention without a mask rounds otherwise, as on a GPU; on a CPU the bits would be the same, and equality say nothing.
    """
    counts = [0, 0]
    dispatch = transformer_ltx2.dispatch_attention_fn

    def counted(query, key, value, attn_mask=None, **kwargs):
        counts[attn_mask is None] += 1
        out = dispatch(query, key, value, attn_mask=attn_mask, **kwargs)
        is_text = key.shape[1] == setups.SMALL["text_tokens"]  # no other tokens are as many
        return out * (1 + 2**-16) if is_text and attn_mask is None else out

    def look():
        seen = tuple(counts)
        counts[:] = 0, 0
        return seen

    monkeypatch.setattr(transformer_ltx2, "dispatch_attention_fn", counted)
    return look


def inputs(transformer, **options) -> dict:
    return models.inputs(transformer, **setups.SMALL | options)


def sites(transformer) -> list:
    """The sites of the video's and of the audio's text masks."""
    handle = ltx2_fastpath.api._handle_of(transformer)
    return [handle.sites["text.mask"], handle.sites["audio_text.mask"]]


def counts(transformer) -> list[tuple[int, int]]:
    return [(site.fast, site.stock) for site in sites(transformer)]


def high(transformer, **kwargs):
    with ltx2_fastpath.quality(transformer, "high"):
        return setups.run(transformer, **kwargs)


def without_masks(transformer, kwargs):
    """What the host computes where it is given no masks: what "high" must compute."""
    with ltx2_fastpath.disabled(transformer):
        return setups.run(transformer, **kwargs | dict.fromkeys(MASKS))


def test_high_is_the_forward_without_masks_and_lossless_after_it_is_stock(transformer, masked):
    kwargs = inputs(transformer, batch_size=2)
    stock = setups.run(transformer, **kwargs)
    attentions = 6 * len(transformer.transformer_blocks)
    texts = attentions // 3
    assert masked() == (texts, attentions - texts)
    ltx2_fastpath.enable(transformer)
    maskless = without_masks(transformer, kwargs)
    masked()
    for dropped in (1, 2):
        assert setups.equal(high(transformer, **kwargs), maskless)
        assert masked() == (0, attentions)
        assert setups.equal(setups.run(transformer, **kwargs), stock)
        assert masked() == (texts, attentions - texts)
        assert counts(transformer) == [(dropped, 0)] * 2
    for ours, host in zip(maskless, stock):
        assert not torch.equal(ours, host) and torch.allclose(ours, host, atol=1e-3)


def test_a_pipeline_looks_at_its_masks_once_for_all_steps(version, monkeypatch):
    """Once in the CFG passes of a prompt and once in the passes beside them: those have another mask."""
    from ltx2_fastpath.patches.transformer import high as patch

    looks = []
    look = patch._all_attend
    monkeypatch.setattr(patch, "_all_attend", lambda mask, dtype: looks.append(mask.shape) or look(mask, dtype))
    pipe = models.tiny_pipeline(version)
    stock = setups.generate(pipe)
    ltx2_fastpath.enable(pipe)
    with ltx2_fastpath.quality(pipe, "high"):
        setups.generate(pipe, num_inference_steps=4)
        assert sorted(looks) == [(1, 16)] * 2 + [(2, 16)] * 2  # for video and for audio
        assert counts(pipe.transformer) == [(3 * 4, 0)] * 2
        assert not setups.equal(setups.generate(pipe), stock)
    assert setups.equal(setups.generate(pipe), stock)


def test_no_look_at_the_values_of_a_mask_that_comes_again(no_computation):
    transformer = setups.tiny()
    ltx2_fastpath.enable(transformer)
    kwargs = inputs(transformer)
    asked = kwargs["encoder_attention_mask"], kwargs["hidden_states"], kwargs["encoder_hidden_states"]
    site = sites(transformer)[0]
    assert site.is_idle(*asked)
    with no_computation:
        assert site.is_idle(*asked)
        with pytest.raises(AssertionError, match="only metadata"):
            site.is_idle(asked[0].new_ones(asked[0].shape), *asked[1:])


def padding(mask):
    mask = mask.clone()
    mask[0, 9:] = 0
    return mask


KEPT = {
    "padding": (padding, "masks some"),
    "padding in a bias": (lambda mask: torch.full((1, 1, 16), -1.0), "masks some"),
    "a bias that favours": (lambda mask: torch.eye(16)[None, 3:4], "masks some"),
    "NaN": (lambda mask: mask.float() * float("nan"), "masks some"),
    "a weaker token": (lambda mask: mask * 0.5, "masks some"),
    "a bias for each query": (lambda mask: torch.zeros(1, 6, 16), "its shape"),
    "the boolean mask of zeros, which masks all": (lambda mask: torch.zeros(1, 1, 16, dtype=torch.bool), "its shape"),
    "a parameter": (lambda mask: torch.nn.Parameter(mask.float(), requires_grad=False), "plain tensor"),
}


@pytest.mark.parametrize("case", KEPT)
def test_masks_that_mask_something_or_cannot_be_read_are_kept(masked, case):
    make, why = KEPT[case]
    transformer = setups.tiny()
    ltx2_fastpath.enable(transformer)
    kwargs = inputs(transformer)
    kwargs["encoder_attention_mask"] = make(kwargs["encoder_attention_mask"])
    only_video = kwargs | dict(audio_encoder_attention_mask=None)
    with ltx2_fastpath.disabled(transformer):
        expected = setups.outcome(lambda: setups.run(transformer, **only_video))
    masked()
    for _ in range(2):
        result = setups.outcome(lambda: high(transformer, **kwargs))
        if isinstance(expected[0], type):
            assert result[0] is expected[0]  # the host's own error
        else:
            assert setups.equal(result, expected)
            assert masked()[0] == len(transformer.transformer_blocks)  # video's, not audio's
    assert counts(transformer) == [(0, 2), (2, 0)]
    (note,) = sites(transformer)[0].notes
    assert why in note and why in str(ltx2_fastpath.report(transformer))
    assert sites(transformer)[1].notes == ["dropped: it masks nothing"]


IDLE = {
    "integers": lambda mask: mask,
    "booleans": lambda mask: mask.bool(),
    "floats": lambda mask: mask.float(),
    "one after rounding": lambda mask: torch.full(mask.shape, 1 + 2**-40, dtype=torch.float64),
    "a bias of zeros": lambda mask: torch.zeros(1, 1, 16),
    "a bias of negative zeros": lambda mask: -torch.zeros(1, 1, 16),
    "a view": lambda mask: torch.ones(2, 32, dtype=torch.int64)[1:, ::2],
    "an expanded row": lambda mask: torch.ones(1, 1, dtype=torch.int64).expand(1, 16),
}


@pytest.mark.parametrize("case", IDLE)
def test_every_form_of_a_mask_that_masks_nothing_is_dropped(masked, case):
    transformer = setups.tiny()
    ltx2_fastpath.enable(transformer)
    kwargs = inputs(transformer)
    kwargs |= dict.fromkeys(MASKS, IDLE[case](kwargs["encoder_attention_mask"]))
    expected = without_masks(transformer, kwargs)
    masked()
    assert setups.equal(high(transformer, **kwargs), expected) and masked()[0] == 0
    assert counts(transformer) == [(1, 0)] * 2


def test_a_mask_of_another_shape_gives_the_hosts_error_or_result():
    transformer = setups.tiny()
    ltx2_fastpath.enable(transformer)
    for shape in ((1, 8), (2, 16), (16,), (1, 1, 1, 16)):
        kwargs = inputs(transformer) | dict(encoder_attention_mask=torch.ones(shape), audio_encoder_attention_mask=None)
        with ltx2_fastpath.disabled(transformer):
            expected = setups.outcome(lambda kwargs=kwargs: setups.run(transformer, **kwargs))
        result = setups.outcome(lambda kwargs=kwargs: high(transformer, **kwargs))
        assert result[0] is expected[0] if isinstance(expected[0], type) else setups.equal(result, expected)
    missing = inputs(transformer) | dict(encoder_hidden_states=None)
    with pytest.raises((AttributeError, TypeError)):
        high(transformer, **missing)


def test_a_mask_changed_in_place_is_looked_at_again(masked):
    transformer = setups.tiny()
    ltx2_fastpath.enable(transformer)
    kwargs = inputs(transformer)
    mask = kwargs["encoder_attention_mask"]
    stock = setups.run(transformer, **kwargs)
    high(transformer, **kwargs)
    mask[:, 9:] = 0
    padded = setups.run(transformer, **kwargs)
    assert not setups.equal(padded, stock)
    assert setups.equal(high(transformer, **kwargs), padded)
    mask.fill_(1)
    masked()
    high(transformer, **kwargs)
    assert masked()[0] == 0 and counts(transformer) == [(2, 1)] * 2


def test_inference_tensors_have_no_version_and_are_looked_at_every_time():
    transformer = setups.tiny()
    ltx2_fastpath.enable(transformer)
    with torch.inference_mode():
        kwargs = inputs(transformer)
        mask = kwargs["encoder_attention_mask"]
        assert mask.is_inference()
        for value, expected in ((1, (1, 0)), (0, (1, 1)), (1, (2, 1))):
            mask[:, 9:] = value
            high(transformer, **kwargs)
            assert counts(transformer) == [expected] * 2


def test_masks_are_not_kept_in_memory():
    transformer = setups.tiny()
    ltx2_fastpath.enable(transformer)
    kwargs = inputs(transformer)
    high(transformer, **kwargs)
    mask = weakref.ref(kwargs["encoder_attention_mask"])
    setups.run(transformer, **inputs(transformer))  # the attentions keep the last mask that they prepared
    del kwargs
    gc.collect()
    assert mask() is None and all(len(site._verdicts) == 0 for site in sites(transformer))


def test_positional_arguments(masked):
    transformer = setups.tiny()
    ltx2_fastpath.enable(transformer)
    kwargs = inputs(transformer)
    expected = without_masks(transformer, kwargs)
    names = ("hidden_states", "audio_hidden_states", "encoder_hidden_states", "audio_encoder_hidden_states", "timestep")
    args = [kwargs.pop(name) for name in names]
    args += [None, kwargs.pop("sigma"), None, *(kwargs.pop(name) for name in MASKS)]
    masked()
    with torch.no_grad(), ltx2_fastpath.quality(transformer, "high"):
        assert setups.equal(transformer(*args, **kwargs), expected)
    assert masked()[0] == 0


@pytest.mark.parametrize("condition", ["disabled", "gradients", "autocast"])
def test_where_the_stock_path_runs_masks_are_kept(masked, condition):
    transformer = setups.tiny()
    kwargs = inputs(transformer)
    contexts = {
        "disabled": lambda: ltx2_fastpath.disabled(transformer),
        "gradients": torch.enable_grad,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }
    with contexts[condition]():
        stock = transformer(**kwargs)
    ltx2_fastpath.enable(transformer, quality="high")
    masked()
    with contexts[condition]():
        assert setups.equal(transformer(**kwargs), stock)
    assert masked()[0] > 0 and counts(transformer) == [(0, 0)] * 2


def test_guidance_passes_share_their_prefix_within_a_quality_only():
    """What a CFG pass left serves an STG pass of its own quality; one of the other quality has other bits."""
    transformer = setups.tiny()
    handle = ltx2_fastpath.enable(transformer)
    cfg, stg = inputs(transformer), inputs(transformer, guidance="stg")
    stock = setups.run(transformer, **stg)
    close = without_masks(transformer, stg)
    prefix = handle.sites["guidance.prefix"]
    assert not setups.equal(stock, close)
    for _ in range(3):
        high(transformer, **cfg)
        assert setups.equal(high(transformer, **stg), close)
    assert prefix.fast > 0
    for _ in range(3):
        setups.run(transformer, **cfg)
        assert setups.equal(setups.run(transformer, **stg), stock)
    reused = prefix.fast
    for _ in range(2):
        setups.run(transformer, **cfg)
        assert setups.equal(high(transformer, **stg), close)
        high(transformer, **cfg)
        assert setups.equal(setups.run(transformer, **stg), stock)
    assert prefix.fast == reused


class TestContext:
    """`quality(pipe, name)` and `enable(pipe, quality=name)`: who computes with which."""

    @pytest.fixture
    def transformer(self):
        return setups.tiny()

    @pytest.fixture
    def tier(self, transformer, masked):
        """tier() -> the quality with which the transformer computes now, by what its attentions are given."""
        kwargs = inputs(transformer)

        def look():
            masked()
            setups.run(transformer, **kwargs)
            return "lossless" if masked()[0] else "high"

        return look

    def test_nested(self, transformer, tier):
        ltx2_fastpath.enable(transformer)
        assert tier() == "lossless"
        with ltx2_fastpath.quality(transformer, "high"):
            with ltx2_fastpath.quality(transformer, "lossless"):
                assert tier() == "lossless"
                with ltx2_fastpath.quality(transformer, "high"):
                    assert tier() == "high"
                assert tier() == "lossless"
            assert tier() == "high"
        assert tier() == "lossless"

    def test_the_default_of_a_handle_and_its_change(self, transformer, tier):
        handle = ltx2_fastpath.enable(transformer, quality="high")
        assert tier() == "high" and repr(handle) == "<FastPath high, active>"
        with ltx2_fastpath.quality(transformer, "lossless"):
            assert tier() == "lossless"
        assert tier() == "high"
        assert ltx2_fastpath.enable(transformer) is handle and tier() == "high"  # what is not named stays
        assert ltx2_fastpath.enable(transformer, quality="lossless") is handle and tier() == "lossless"
        assert ltx2_fastpath.enable(transformer, quality="high") is handle and tier() == "high"
        ltx2_fastpath.disable(transformer)
        assert tier() == "lossless"

    def test_exceptions_restore(self, transformer, tier):
        ltx2_fastpath.enable(transformer)
        with (
            pytest.raises(KeyError),
            ltx2_fastpath.quality(transformer, "high"),
            ltx2_fastpath.quality(transformer, "high"),
        ):
            raise KeyError("inside")
        assert tier() == "lossless"

    def test_contexts_that_do_not_end_in_turn(self, transformer, tier):
        """Generators and coroutines of one thread interleave."""

        def request(name):
            with ltx2_fastpath.quality(transformer, name):
                yield tier()
                yield tier()

        handle = ltx2_fastpath.enable(transformer)
        first, second = request("high"), request("lossless")
        assert (next(first), next(second), next(first)) == ("high", "lossless", "lossless")
        assert list(first) == []  # the first one's context ends inside of the second one's
        assert (next(second), list(second)) == ("lossless", [])
        assert tier() == "lossless" and handle._choices.qualities == ()

    def test_contexts_left_in_another_thread(self, transformer, tier):
        """A server resumes a generator in whichever thread is free."""

        def request():
            with ltx2_fastpath.quality(transformer, "high"), ltx2_fastpath.disabled(transformer):
                yield

        handle = ltx2_fastpath.enable(transformer)
        running, states = request(), []
        next(running)

        def leave():
            states.append(list(running))
            states.append((handle._choices.disabled, handle._choices.qualities))

        thread = threading.Thread(target=leave)
        thread.start()
        thread.join(60)
        assert states == [[], (0, ())]
        assert (handle._choices.disabled, handle._choices.qualities) == (0, ()) and tier() == "lossless"

    def test_an_exception_in_the_forward_restores(self, transformer, tier):
        ltx2_fastpath.enable(transformer)
        with pytest.raises(RuntimeError):
            high(transformer, **inputs(transformer) | dict(hidden_states=torch.zeros(1, 6, 5)))
        assert tier() == "lossless"

    def test_no_op_where_nothing_is_enabled(self, transformer, tier):
        with ltx2_fastpath.quality(transformer, "high"):
            assert tier() == "lossless"
            ltx2_fastpath.enable(transformer)
            assert tier() == "high"  # the thread's choice, whatever is enabled meanwhile

    def test_no_op_where_the_fast_path_is_off(self, transformer, tier, monkeypatch):
        monkeypatch.setattr("ltx2_fastpath.patches.handle.why_unsupported", lambda room: "the test says so")
        handle = ltx2_fastpath.enable(transformer, quality="high")
        with ltx2_fastpath.quality(transformer, "high"):
            assert tier() == "lossless" and not handle.active

    def test_disabled_wins(self, transformer, tier):
        ltx2_fastpath.enable(transformer)
        with ltx2_fastpath.quality(transformer, "high"):
            with ltx2_fastpath.disabled(transformer):
                assert tier() == "lossless"
            assert tier() == "high"

    def test_holds_for_its_own_thread_and_pipeline_only(self, transformer, tier, masked):
        ltx2_fastpath.enable(transformer)
        other = setups.tiny()
        ltx2_fastpath.enable(other)
        seen = {}
        with ltx2_fastpath.quality(transformer, "high"):
            thread = threading.Thread(target=lambda: seen.update(tier=tier()))
            thread.start()
            thread.join(60)
            assert seen == {"tier": "lossless"} and tier() == "high"
            masked()
            setups.step(other)
            assert masked()[0] > 0

    def test_threads_of_both_qualities_at_once(self, transformer):
        ltx2_fastpath.enable(transformer)
        kwargs = inputs(transformer)
        expected = {"lossless": setups.run(transformer, **kwargs), "high": without_masks(transformer, kwargs)}
        start, wrong = threading.Barrier(4), []

        def request(name):
            start.wait(60)
            for _ in range(5):
                with ltx2_fastpath.quality(transformer, name):
                    if not setups.equal(setups.run(transformer, **kwargs), expected[name]):
                        wrong.append(name)

        threads = [threading.Thread(target=request, args=(name,)) for name in ("lossless", "high") * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == [] and counts(transformer) == [(10, 0)] * 2

    def test_report_names_the_tier_and_what_was_dropped(self, transformer):
        ltx2_fastpath.enable(transformer)
        kwargs = inputs(transformer)
        with ltx2_fastpath.quality(transformer, "high"):
            setups.run(transformer, **kwargs)
            assert ltx2_fastpath.report(transformer).status == "active (high)"
        report = ltx2_fastpath.report(transformer)
        assert report.status == "active (lossless)"
        rows = {row["site"]: row for row in report.rows if row["site"].endswith("text.mask")}
        dropped = dict(fast=1, first=0, stock=0, notes=["dropped: it masks nothing"])
        assert rows == {site: dict(site=site, **dropped) for site in ("text.mask", "audio_text.mask")}

    def test_lossless_requests_have_no_rows_for_masks(self, transformer):
        ltx2_fastpath.enable(transformer)
        setups.step(transformer)
        assert not [row for row in ltx2_fastpath.report(transformer).rows if row["site"].endswith("text.mask")]
