"""Quality "high" on real kernels: is attention without the idle mask as exact as with it, and is lossless untouched beside it?"""

import math

import pytest
import torch
from diffusers.models.transformers import transformer_ltx2
from ltx2_fastpath.patches.transformer.high import TextMask
from test_latents import OPERANDS, distance_of_one_rounding_less

import ltx2_fastpath
from ltx2_fastpath.testing import models

DEVICE = "cuda"
HEADS, TEXT = 32, 1024
#: The text attention of each stream: tokens, and the width of a head.
STREAMS = {"video": (6144, 128), "audio": (126, 64)}
LARGE = dict(height=512, width=768, num_frames=121)
SMALL = dict(height=256, width=384, num_frames=9)
NO_MASKS = dict(encoder_attention_mask=None, audio_encoder_attention_mask=None)
LATENTS = ("hidden_states", "audio_hidden_states")


def draw(*shape, generator):
    return torch.randn(shape, generator=generator, device=DEVICE)


def spread(shape, octaves, generator):
    """Powers of two between 2^-octaves and 2^octaves."""
    return torch.exp2(torch.randint(-octaves, octaves + 1, shape, generator=generator, device=DEVICE))


def plain(q, k, v, generator):
    return q, k, v


def large_range(q, k, v, generator):
    """Operands over 40 octaves: channels of q and k, whose products stay moderate, and whole heads of v."""
    channels, heads = spread((1, 1, 1, q.shape[3]), 20, generator), spread((1, 1, HEADS, 1), 20, generator)
    # Three quarters of the inverse leaves a channel of k a different weight in each product.
    return q * channels, k / channels * (0.75 + 0.5 * torch.rand_like(k[:, :1])), v * heads


def denormals(q, k, v, generator):
    """Every eighth value too small for a normal bf16."""

    def thinned(x):
        return torch.where(torch.rand(x.shape, generator=generator, device=DEVICE) < 0.125, x * 1e-39, x)

    return thinned(q), thinned(k), thinned(v)


def huge_channel(q, k, v, generator):
    """One channel that adds about 200 to all logits of a query, as massive activations do."""
    q[..., 7] += 48.0
    k[..., 7] = 48.0
    return q, k, v


def peaked(q, k, v, generator):
    """Logits of a standard deviation of 16: one or two tokens have all the weight."""
    return 4 * q, 4 * k, v


INPUTS = {function.__name__: function for function in (plain, large_range, denormals, huge_channel, peaked)}


def ulp_bf16(x):
    """The distance of bf16 values at the size of x (fp64, positive, at least 2^-126): its power of two, over 2^7."""
    return (x.view(torch.int64) & 0x7FF0000000000000).view(torch.float64) * 2.0**-7


def exact(q, k, v):
    """Attention in fp64 on the bf16 values, one head after the other (50 MB of logits each)."""
    heads = []
    for head in range(HEADS):
        query, key, value = (x[0, :, head].double() for x in (q, k, v))
        heads.append(torch.softmax(query @ key.T / math.sqrt(q.shape[3]), dim=-1) @ value)
    return torch.stack(heads, dim=1)[None]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("case", INPUTS)
@torch.no_grad()
def test_attention_without_an_idle_mask(case, stream):
    """The budget of the tier: of the error against fp64, twice the eager chain's; of the distance from that, one ULP in bf16."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    tokens, width = STREAMS[stream]
    q, k, v = (draw(1, rows, HEADS, width, generator=generator) for rows in (tokens, TEXT, TEXT))
    q, k, v = (x.to(torch.bfloat16) for x in INPUTS[case](q, k, v, generator))
    # What the host makes of a mask of ones: a bias, once for each head.
    ones = torch.ones(1, TEXT, dtype=torch.int64, device=DEVICE)
    bias = ((1 - ones.to(torch.bfloat16)) * -10000.0).repeat_interleave(HEADS, dim=0).view(1, HEADS, 1, TEXT)
    eager = transformer_ltx2.dispatch_attention_fn(q, k, v, attn_mask=bias).double()
    high = transformer_ltx2.dispatch_attention_fn(q, k, v, attn_mask=None).double()
    truth = exact(q, k, v)
    assert eager.isfinite().all() and high.isfinite().all() and eager.abs().max() > 0

    # Heads differ by 2^40 in size where the range is large: each is judged in units of its own.
    size = truth.pow(2).mean(dim=(1, 3), keepdim=True).sqrt()
    errors = {name: (x - truth).abs() / size for name, x in (("eager", eager), ("high", high))}

    # A value near zero is a difference of large ones, and its own ULP says nothing: no ULP is smaller than that of the root mean
    # square of its row (the values of one token and head).
    rows = torch.maximum(eager.pow(2).mean(-1, keepdim=True).sqrt(), high.pow(2).mean(-1, keepdim=True).sqrt())
    unit = ulp_bf16(torch.maximum(torch.maximum(eager.abs(), high.abs()), rows).clamp(min=2.0**-126))
    distance = (eager - high).abs() / unit
    figures = {f"{name} {kind}": getattr(error, kind)().item() for name, error in errors.items() for kind in ("max", "mean")}
    above, differ = (distance > 1).double().mean().item(), (eager != high).double().mean().item()
    print(f"\n{stream}, {case}: distance {distance.max().item():.2f} ULP at most, {above:.2e} of the values above one,")
    print(f"  {differ:.2e} differ; errors in units of a head's values:")
    print("  " + ", ".join(f"{name} {value:.3e}" for name, value in figures.items()))

    assert figures["high max"] <= 2 * figures["eager max"] and figures["high mean"] <= 2 * figures["eager mean"]
    # Where two tokens have all the weight, or all logits are huge, a probability that rounds to its neighbour can move an output
    # by more than one ULP, which happens between any two attention kernels: there the error alone counts.
    if case not in ("peaked", "huge_channel"):
        assert distance.max() <= 1


@pytest.mark.parametrize("width", [4096, 2048], ids=["video", "audio"])
@pytest.mark.parametrize("operands", OPERANDS)
def test_latents_laid_out(operands, width):
    distance = distance_of_one_rounding_less(operands, width, DEVICE)
    print(f"{operands.__name__}, width {width}: distance {distance:.2f} ULP at most")
    assert distance <= 1


@pytest.fixture(scope="module")
def transformer():
    yield models.build_transformer("2.3", num_layers=2, device=DEVICE, dtype=torch.bfloat16)


@pytest.fixture
def model(transformer):
    yield transformer
    ltx2_fastpath.disable(transformer)


@torch.no_grad()
def forward(model, kwargs):
    return model(**kwargs)


def high(model, kwargs):
    with ltx2_fastpath.quality(model, "high"):
        return forward(model, kwargs)


def equal(a, b) -> bool:
    return all(map(torch.equal, a, b))


def masks(handle) -> list[tuple[int, int]]:
    return [(site.fast, site.stock) for site in (handle.sites["text.mask"], handle.sites["audio_text.mask"])]


@pytest.mark.parametrize("guidance", ["cfg", "stg", "isolated"])
def test_high_is_near_lossless_which_stays_stock_beside_it(model, guidance):
    kwargs = models.inputs(model, **LARGE, guidance=guidance)
    stock = forward(model, kwargs)
    maskless = forward(model, kwargs | NO_MASKS | {name: kwargs[name].contiguous() for name in LATENTS})
    handle = ltx2_fastpath.enable(model)
    for count in (1, 2, 3):
        close = high(model, kwargs)
        assert equal(close, maskless), "high is not the forward without masks, on latents laid out token by token"
        assert masks(handle) == [(count, 0)] * 2
        assert equal(forward(model, kwargs), stock)
    for name, mine, host in zip(("video", "audio"), close, stock):
        difference, size = (mine.double() - host.double()).abs(), host.double().std()
        largest, mean = (difference.max() / size).item(), (difference.mean() / size).item()
        print(f"\n{guidance}, {name}: largest and mean difference {largest:.2e} and {mean:.2e} of the outputs' deviation")
        assert mean < 0.02 and largest < 0.5


def test_a_mask_of_a_padded_prompt_is_kept(model):
    kwargs = models.inputs(model, **LARGE)
    mask = kwargs["encoder_attention_mask"].clone()
    mask[:, 700:] = 0
    kwargs |= dict(encoder_attention_mask=mask, audio_encoder_attention_mask=mask)
    stock = forward(model, kwargs)
    handle = ltx2_fastpath.enable(model, quality="high")
    for _ in range(2):
        assert equal(forward(model, kwargs), stock)
    assert masks(handle) == [(0, 2)] * 2 and "masks some" in str(ltx2_fastpath.report(model))


def test_both_qualities_as_cuda_graphs(model):
    kwargs = models.inputs(model, **SMALL)
    stock = forward(model, kwargs)
    maskless = forward(model, kwargs | NO_MASKS)
    handle = ltx2_fastpath.enable(model, cuda_graphs=True)
    for _ in range(5):
        assert equal(high(model, kwargs), maskless) and equal(forward(model, kwargs), stock)
    graphs = handle.sites["cuda_graphs"]
    assert graphs.fast == 2 * 3, graphs.notes  # each is seen, captured, then replayed


def test_a_mask_that_comes_again_does_not_synchronise(model):
    kwargs = models.inputs(model, **SMALL)
    asked = kwargs["encoder_attention_mask"], kwargs["hidden_states"], kwargs["encoder_hidden_states"]
    site = TextMask("text.mask")
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            site.is_idle(*asked)
        torch.cuda.set_sync_debug_mode(mode)
        assert site.is_idle(*asked)
        torch.cuda.set_sync_debug_mode("error")
        assert site.is_idle(*asked)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_masks_are_kept_while_a_graph_is_captured(model):
    kwargs = models.inputs(model, **SMALL)
    site = TextMask("text.mask")
    asked = kwargs["encoder_attention_mask"], kwargs["hidden_states"], kwargs["encoder_hidden_states"]
    assert site.is_idle(*asked)
    x = torch.zeros(8, device=DEVICE)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        assert not site.is_idle(*asked)
    assert any("captured" in note for note in site.notes)
