"""The block, the attention and the feed-forward: is the patched forward the stock one, and does every step go through its op?

The kernels are replaced by counted stand-ins that compute the eager chain (`stand_ins`), so that what is tested here is the order
of the steps and what each gets; test_ops_*.py test the kernels. One test runs them for real.
"""

import collections

import pytest
import torch
from diffusers.models.transformers import transformer_ltx2

import ltx2_fastpath
from ltx2_fastpath import first_sight
from ltx2_fastpath.testing import models

pytestmark = pytest.mark.interpreter
SMALL = dict(height=64, width=96, num_frames=9, text_tokens=16)
LAYERS = 2


def inputs(transformer, *, change=None, **options):
    kwargs = models.inputs(transformer, **SMALL | options)
    return kwargs | (change(kwargs) if change else {})


def forward(transformer, kwargs):
    with torch.no_grad():
        return transformer(**kwargs)


def equal(a, b) -> bool:
    return len(a) == len(b) == 2 and all(map(torch.equal, a, b))


def expected_launches(version, *, layers=LAYERS, perturbed=0, a2v=True, v2a=True) -> dict[str, int]:
    """How often each op stands in a forward of `layers` layers, of which `perturbed` skip their self-attentions."""
    gated = since_2_3 = version != "2.0"
    cross = a2v or v2a
    attentions = 4 + a2v + v2a
    norms = dict(
        # First norms; prompts; a last norm whose stream got nothing from the other (each alone is asymmetric).
        rms_norm_modulate=2 + 2 * since_2_3 + (cross and not a2v) + (cross and not v2a),
        # Second norms, a2v/v2a norms, last norms, last residuals.
        gated_residual=2 + 2 * cross + (a2v or not cross) + (v2a or not cross) + 2,
    )
    counts = dict(ada_values=1, **norms, qk_norm_split_rope=attentions, head_gate=attentions * gated)
    counts = {name: layers * count for name, count in counts.items()}
    counts["qk_norm_split_rope"] -= 2 * perturbed
    return {name: count for name, count in counts.items() if count}


def last_tokens_masked(kwargs):
    mask = kwargs["encoder_attention_mask"].clone()
    mask[:, 10:] = 0
    mask[-1, :3] = 0
    return dict(encoder_attention_mask=mask, audio_encoder_attention_mask=mask.flip(1))


def self_attention_mask(kwargs):
    batch, tokens, _ = kwargs["hidden_states"].shape
    mask = torch.rand(batch, tokens, tokens, generator=torch.Generator().manual_seed(0))
    return dict(video_self_attention_mask=(mask > 0.3).float())


def per_token_audio(kwargs):
    batch, tokens, _ = kwargs["audio_hidden_states"].shape
    return dict(audio_timestep=torch.linspace(0, 900, batch * tokens).view(batch, tokens))


# Options of `models.inputs`, `change` to its result, and what `expected_launches` must know.
CASES = {
    "text to video": (dict(), {}),
    "two rows": (dict(batch_size=2), {}),
    "image to video": (dict(image_to_video=True), {}),
    "image to video, two rows": (dict(image_to_video=True, batch_size=2), {}),
    "stg": (dict(guidance="stg"), dict(perturbed=1)),
    "stg, image to video, two rows": (dict(guidance="stg", image_to_video=True, batch_size=2), dict(perturbed=1)),
    "isolated": (dict(guidance="isolated"), dict(a2v=False, v2a=False)),
    "isolated, image to video": (dict(guidance="isolated", image_to_video=True), dict(a2v=False, v2a=False)),
    "one of two rows perturbed": (
        dict(guidance="stg", batch_size=2, change=lambda _: dict(perturbation_mask=torch.tensor([0.0, 1.0]))),
        {},
    ),
    "no row perturbed": (
        dict(guidance="stg", batch_size=2, change=lambda _: dict(perturbation_mask=torch.ones(2, 1, 1))),
        {},
    ),
    "both layers perturbed": (
        dict(guidance="stg", change=lambda _: dict(spatio_temporal_guidance_blocks=[0, 1])),
        dict(perturbed=2),
    ),
    "prompt masks": (dict(batch_size=2, change=last_tokens_masked), {}),
    "video self-attention mask": (dict(batch_size=2, change=self_attention_mask), {}),
    "the other cross timestep": (
        dict(image_to_video=True, batch_size=2, change=lambda kwargs: dict(use_cross_timestep=not kwargs["use_cross_timestep"])),
        {},
    ),
    "a timestep for each audio token": (dict(image_to_video=True, batch_size=2, change=per_token_audio), {}),
    "coordinates from the sizes": (dict(batch_size=2, change=lambda _: dict(video_coords=None, audio_coords=None)), {}),
    "no prompt masks": (
        dict(change=lambda _: dict(encoder_attention_mask=None, audio_encoder_attention_mask=None)),
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_forward_equals_stock_and_every_step_goes_through_its_op(stand_ins, any_width, version, transformer, case):
    options, launches = CASES[case]
    if version == "2.0":
        launches = launches | dict(perturbed=0)  # its attentions know no perturbation
    kwargs = inputs(transformer, **options)
    stock = forward(transformer, kwargs)
    handle = ltx2_fastpath.enable(transformer)

    assert equal(forward(transformer, kwargs), stock)  # each signature is verified at its first layer
    counted = before = expected_launches(version, **launches)
    assert stand_ins == counted

    sites = {name: (site.fast, site.stock) for name, site in handle.sites.items()}
    assert equal(forward(transformer, kwargs), stock)
    assert stand_ins == {name: 2 * count for name, count in before.items()}
    for name, site in handle.sites.items():
        if isinstance(site, first_sight.FirstSight):
            fast, verified = sites[name]
            assert site.stock == verified and site.fast - fast == fast + verified  # all that ran, ran fast
    assert not handle.stock_calls


@pytest.mark.parametrize(
    "options",
    [dict(batch_size=2), dict(image_to_video=True, guidance="stg"), dict(guidance="isolated")],
    ids=["two rows", "stg", "isolated"],
)
def test_prompt_modulation_without_timestep(stand_ins, any_width, options):
    transformer = models.tiny_transformer("2.3", use_prompt_adaln_single=False)
    kwargs = inputs(transformer, **options)
    stock = forward(transformer, kwargs)
    handle = ltx2_fastpath.enable(transformer)
    for _ in range(2):
        assert equal(forward(transformer, kwargs), stock)
    assert handle.sites["text"].fast == handle.sites["audio_text"].fast == 2 * LAYERS - 1 and not handle.stock_calls


def test_interleaved_rope_leaves_those_attentions_to_the_host(stand_ins, any_width):
    transformer = models.tiny_transformer("2.3", rope_type="interleaved")
    kwargs = inputs(transformer, batch_size=2)
    stock = forward(transformer, kwargs)
    handle = ltx2_fastpath.enable(transformer)
    for _ in range(2):
        assert equal(forward(transformer, kwargs), stock)
    reason = "rope_type is 'interleaved'"
    rotated = ("attn1", "audio_attn1", "audio_to_video_attn", "video_to_audio_attn")
    assert all(handle.stock_calls[name, reason] == 2 * LAYERS for name in rotated)
    assert not any(name.endswith("attn2") for name, _ in handle.stock_calls)
    # Text cross-attention does not rotate, and the block around it all stays fast.
    assert stand_ins["qk_norm_split_rope"] == 2 * 2 * LAYERS
    for name in ("ada_values", "rms_norm_modulate", "gated_residual"):
        assert stand_ins[name] == 2 * expected_launches("2.3")[name]


def block_call(transformer, **options):
    """A block of `transformer` and the keyword arguments of its call in a forward."""
    block, seen = transformer.transformer_blocks[0], {}
    handle = block.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    forward(transformer, inputs(transformer, **options))
    handle.remove()
    return block, seen


@pytest.mark.parametrize("a2v, v2a", [(True, False), (False, True), (True, True), (False, False)])
def test_one_sided_cross_attention(stand_ins, any_width, version, transformer, a2v, v2a):
    block, kwargs = block_call(transformer, batch_size=2, image_to_video=True)
    kwargs |= dict(use_a2v_cross_attention=a2v, use_v2a_cross_attention=v2a)
    with torch.no_grad():
        stock = block(**kwargs)
        handle = ltx2_fastpath.enable(transformer)
        for _ in range(2):
            assert equal(block(**kwargs), stock)
    assert stand_ins == {k: 2 * n for k, n in expected_launches(version, layers=1, a2v=a2v, v2a=v2a).items()}
    assert handle.sites["norm3.without_residual"].fast == (v2a and not a2v)
    assert handle.sites["audio_norm3.without_residual"].fast == (a2v and not v2a)


def test_block_called_by_position(stand_ins, any_width, transformer, version):
    """As gradient checkpointing calls it."""
    import inspect

    block, kwargs = block_call(transformer, batch_size=2)
    args = [kwargs[name] for name in list(inspect.signature(type(block).forward).parameters)[1:]]
    with torch.no_grad():
        stock = block(*args)
        ltx2_fastpath.enable(transformer)
        for _ in range(2):
            assert equal(block(*args), stock)
    assert stand_ins == {name: 2 * count for name, count in expected_launches(version, layers=1).items()}


def test_every_attention_mask_reaches_its_attention(stand_ins, any_width, transformer):
    """Those that the model itself never passes, too."""
    block, kwargs = block_call(transformer, batch_size=2)
    generator = torch.Generator().manual_seed(0)
    video, audio = kwargs["hidden_states"].shape[1], kwargs["audio_hidden_states"].shape[1]
    masks = {
        "self_attention_mask": (video, video),
        "audio_self_attention_mask": (audio, audio),
        "a2v_cross_attention_mask": (video, audio),
        "v2a_cross_attention_mask": (audio, video),
        "encoder_attention_mask": (1, 16),
        "audio_encoder_attention_mask": (1, 16),
    }
    with torch.no_grad():
        plain = block(**kwargs)
        for name, shape in masks.items():
            kwargs[name] = (torch.rand(2, *shape, generator=generator) < 0.5).float() * -10000.0
        stock = block(**kwargs)
        for name in masks:
            assert not equal(block(**kwargs | {name: None}), stock), name  # each mask shows
        assert not equal(plain, stock)
        ltx2_fastpath.enable(transformer)
        for _ in range(2):
            assert equal(block(**kwargs), stock)
    assert stand_ins["qk_norm_split_rope"] == 12


@pytest.mark.parametrize("guidance", ["cfg", "stg", "isolated"])
def test_layers_with_weights_are_called_in_the_stock_order(stand_ins, any_width, version, transformer, guidance):
    """Offloading that prefetches learns the order of one forward and goes by it in the next, which may be the other kind's."""
    kwargs = inputs(transformer, guidance=guidance)
    called: list[str] = []
    for name, layer in transformer.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda layer, args, name=name: called.append(name))
    forward(transformer, kwargs)
    stock, called[:] = list(called), []
    assert len(stock) > 30 * LAYERS
    handle = ltx2_fastpath.enable(transformer)
    forward(transformer, kwargs)
    assert called == stock and not handle.stock_calls


def test_mask_that_changes_in_place_between_calls(stand_ins, any_width, transformer):
    """What was made of a mask is kept for the next layer, and must not be taken for what the mask has become."""
    block, kwargs = block_call(transformer)
    mask = kwargs["encoder_attention_mask"] = torch.zeros(1, 1, 16)
    ltx2_fastpath.enable(transformer)
    results = []
    for hidden in (slice(0, 4), slice(4, 9), slice(9, 16)):
        mask.zero_()
        mask[..., hidden] = -10000.0
        with torch.no_grad():
            for _ in range(2):
                results.append(block(**kwargs))
            with ltx2_fastpath.disabled(transformer):
                stock = block(**kwargs)
        assert equal(results[-1], stock) and equal(results[-2], stock)
    assert not equal(results[0], results[2]) and not equal(results[2], results[4])


@pytest.mark.parametrize("version", ["2.0", "2.3"])
@pytest.mark.parametrize("guidance", ["cfg", "stg"])
def test_attention_backend_that_returns_another_dtype(stand_ins, any_width, monkeypatch, version, guidance):
    """The host casts what a backend returns to the dtype of the query."""
    transformer = models.tiny_transformer(version, dtype=torch.bfloat16)
    dispatch = transformer_ltx2.dispatch_attention_fn
    monkeypatch.setattr(
        transformer_ltx2, "dispatch_attention_fn", lambda *args, **kwargs: dispatch(*args, **kwargs).float() * 1.001
    )
    kwargs = inputs(transformer, batch_size=2, guidance=guidance)
    if guidance == "stg":
        kwargs["perturbation_mask"] = torch.tensor([0.0, 1.0], dtype=torch.bfloat16)
    stock = forward(transformer, kwargs)
    handle = ltx2_fastpath.enable(transformer)
    for _ in range(2):
        assert equal(forward(transformer, kwargs), stock)
    assert stock[0].dtype == torch.bfloat16 and not handle.stock_calls
    assert stand_ins["head_gate"] == 2 * expected_launches(version).get("head_gate", 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("guidance", ["cfg", "stg", "isolated"])
def test_half_precision(stand_ins, any_width, version, dtype, guidance):
    transformer = models.tiny_transformer(version, dtype=dtype)
    kwargs = inputs(transformer, batch_size=2, image_to_video=True, guidance=guidance)
    stock = forward(transformer, kwargs)
    handle = ltx2_fastpath.enable(transformer)
    for _ in range(2):
        assert equal(forward(transformer, kwargs), stock)
    assert handle.sites["norm1"].fast == 2 * LAYERS - 1 and not handle.stock_calls


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_special_values_in_the_latents(stand_ins, any_width, transformer, special):
    kwargs = inputs(transformer, batch_size=2)
    kwargs["hidden_states"][0, 2, 1] = special
    stock = forward(transformer, kwargs)
    handle = ltx2_fastpath.enable(transformer)
    for _ in range(2):
        assert first_sight.same_bits(forward(transformer, kwargs), stock)
    assert stock[0].isnan().any() and stock[0][1].isfinite().all()
    assert handle.sites["norm1"].fast == 2 * LAYERS - 1


def outcome(call):
    """The outputs of a call, or the type and text of its error."""
    try:
        return call()
    except RuntimeError as error:
        return type(error), str(error)


def no_text(kwargs):
    names = ("encoder_hidden_states", "audio_encoder_hidden_states", "encoder_attention_mask", "audio_encoder_attention_mask")
    return {name: kwargs[name][:, :0] for name in names}


def no_audio(kwargs):
    return dict(
        audio_hidden_states=kwargs["audio_hidden_states"][:, :0],
        audio_coords=kwargs["audio_coords"][:, :, :0],
        audio_num_frames=0,
    )


@pytest.mark.parametrize("change", [no_text, no_audio])
def test_no_tokens_give_the_stock_result_or_error(stand_ins, any_width, transformer, change):
    kwargs = inputs(transformer, change=change)
    stock = outcome(lambda: forward(transformer, kwargs))
    ltx2_fastpath.enable(transformer)
    for _ in range(2):
        found = outcome(lambda: forward(transformer, kwargs))
        assert found == stock if isinstance(stock[0], type) else first_sight.same_bits(found, stock)


def skewed(value):
    if isinstance(value, torch.Tensor):
        return value + 1
    return type(value)(map(skewed, value))


@pytest.mark.parametrize("name", expected_launches("2.3"))
def test_the_result_of_every_op_is_used(stand_ins, any_width, name, monkeypatch):
    """A stand-in that is right when it is judged, and wrong later: the outputs must follow it."""
    import importlib

    transformer = models.tiny_transformer("2.3")
    kwargs = inputs(transformer, batch_size=2)
    stock = forward(transformer, kwargs)
    ltx2_fastpath.enable(transformer)
    assert equal(forward(transformer, kwargs), stock)
    op = importlib.import_module(f"ltx2_fastpath.ops.{name}")
    monkeypatch.setattr(op, "launch", lambda candidate, *args: skewed(op.eager(*args)))
    video, audio = forward(transformer, kwargs)
    assert not torch.equal(video, stock[0]) and not torch.equal(audio, stock[1])


SITES = collections.Counter(
    ada_values=1, norm1=1, audio_norm1=1, text=1, audio_text=1, norm2=1, audio_norm2=1, audio_to_video_norm=1,
    video_to_audio_norm=1, norm3=1, audio_norm3=1, residual=1, audio_residual=1,
)  # fmt: skip


def test_every_site_of_the_block_is_reached_once_a_layer(stand_ins, any_width):
    transformer = models.tiny_transformer("2.3", num_layers=3)
    handle = ltx2_fastpath.enable(transformer)
    forward(transformer, inputs(transformer))
    reached = {name: site.fast + site.stock for name, site in handle.sites.items() if name in SITES}
    assert reached == dict.fromkeys(SITES, 3)


def eligible_transformer(version, **options):
    """One layer, narrow, but as the kernels want it: 8 heads of 128 and of 64 (both streams rotate by the same heads)."""
    sizes = dict(
        num_attention_heads=8, attention_head_dim=128, cross_attention_dim=1024,
        audio_num_attention_heads=8, audio_attention_head_dim=64, audio_cross_attention_dim=512,
    )  # fmt: skip
    return models.tiny_transformer(version, num_layers=1, **sizes, **options)


@pytest.mark.parametrize("guidance", ["cfg", "stg", "isolated"])
@pytest.mark.parametrize("image_to_video", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_op_refuses_what_the_model_passes(stand_ins, version, dtype, image_to_video, guidance):
    """With the real refusals: layouts, alignments, dtypes and norms are those that the kernels take."""
    transformer = eligible_transformer(version, dtype=dtype)
    kwargs = inputs(transformer, num_frames=17, batch_size=2, image_to_video=image_to_video, guidance=guidance)
    stock = forward(transformer, kwargs)
    handle = ltx2_fastpath.enable(transformer)
    for _ in range(2):
        assert equal(forward(transformer, kwargs), stock)
    refused = {
        name: verdict.note
        for name, site in handle.sites.items()
        if isinstance(site, first_sight.FirstSight)
        for verdict in site.verdicts.values()
        if not verdict.fast
    }
    assert refused == {}
    expected = expected_launches(version, layers=1, perturbed=guidance == "stg" and version != "2.0")
    if guidance == "isolated":
        expected = expected_launches(version, layers=1, a2v=False, v2a=False)
    assert stand_ins == {name: 2 * count for name, count in expected.items()}


def doubled(value):
    return value.double() if torch.is_tensor(value) and value.is_floating_point() else value


def test_real_kernels_in_a_whole_forward(monkeypatch):
    """Under Triton's interpreter, in fp32. torch sums in another order on the CPU, so bits cannot agree: the outputs must be as
    close to those in fp64 as the stock forward's are, and nothing may be out of place."""
    transformer = eligible_transformer("2.3")
    kwargs = inputs(transformer, num_frames=17, image_to_video=True)
    stock = forward(transformer, kwargs)

    def close(a, b):
        if not isinstance(a, torch.Tensor):
            return len(a) == len(b) and all(map(close, a, b))
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5)

    monkeypatch.setattr(first_sight, "same_bits", close)
    from conftest import ops

    for op in ops().values():
        monkeypatch.setattr(op, "rehearsals", lambda *args: ())
    handle = ltx2_fastpath.enable(transformer)
    assert equal(forward(transformer, kwargs), stock)
    fast = forward(transformer, kwargs)
    expected = expected_launches("2.3", layers=1)
    assert sum(site.fast for site in handle.sites.values() if isinstance(site, first_sight.FirstSight)) == sum(expected.values())
    assert not equal(fast, stock)  # the kernels did run

    ltx2_fastpath.disable(transformer)
    doubled = {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value for name, value in kwargs.items()
    }
    exact = forward(transformer.double(), doubled)
    for mine, host, true in zip(fast, stock, exact):
        assert (mine - true).abs().max() <= 2 * (host - true).abs().max()
        assert (mine - true).abs().max() < 1e-3 * true.abs().max()


def stock_reasons(transformer, call):
    """Outputs of `call` with the fast path enabled, and {(place, reason): calls} of what took the stock path."""
    handle = ltx2_fastpath.enable(transformer)
    outputs = call()
    assert not any(site.fast or site.stock for site in handle.sites.values())
    return outputs, handle.stock_calls


def test_gradients_enabled_takes_the_stock_path(stand_ins, any_width, transformer):
    kwargs = inputs(transformer)
    stock = transformer(**kwargs)
    outputs, reasons = stock_reasons(transformer, lambda: transformer(**kwargs))
    assert equal(outputs, stock) and stand_ins.total() == 0
    assert reasons["block", "gradients are enabled"] == LAYERS and reasons["attn1", "gradients are enabled"] == LAYERS
    assert "gradients are enabled" in str(ltx2_fastpath.report(transformer))


def test_autocast_takes_the_stock_path(stand_ins, any_width, transformer):
    kwargs = inputs(transformer)

    def call():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward(transformer, kwargs)

    stock = call()
    outputs, reasons = stock_reasons(transformer, call)
    assert equal(outputs, stock) and not equal(outputs, forward(transformer, kwargs))
    assert reasons["block", "autocast is active"] == LAYERS


def test_fp64_takes_the_stock_path(stand_ins, any_width, version):
    transformer = models.tiny_transformer(version, dtype=torch.float64)
    kwargs = inputs(transformer)
    stock = forward(transformer, kwargs)
    handle = ltx2_fastpath.enable(transformer)
    assert equal(forward(transformer, kwargs), stock) and stand_ins.total() == 0
    assert handle.stock_calls["block", "the hidden states are torch.float64"] == LAYERS


@pytest.mark.parametrize("checkpointing", [True, False])
def test_training_gives_the_stock_gradients(stand_ins, any_width, version, checkpointing):
    gradients = []
    for enable in (False, True):
        transformer = models.tiny_transformer(version).train().requires_grad_(True)
        if checkpointing:
            transformer.enable_gradient_checkpointing()
        if enable:
            handle = ltx2_fastpath.enable(transformer)
        video, audio = transformer(**inputs(transformer, batch_size=2, image_to_video=True))
        (video.square().mean() + audio.square().mean()).backward()
        gradients.append({name: parameter.grad for name, parameter in transformer.named_parameters()})
    stock, ours = gradients
    assert sum(grad is not None for grad in stock.values()) > 100
    for name, grad in stock.items():
        assert (grad is None) == (ours[name] is None) and (grad is None or torch.equal(grad, ours[name])), name
    assert stand_ins.total() == 0
    # Checkpointed blocks run once more in the backward pass.
    assert handle.stock_calls["block", "gradients are enabled"] == LAYERS * (1 + checkpointing)


class Subclass(torch.Tensor):
    """As quantisation and parallelism libraries wrap activations."""


def test_tensor_subclass_takes_the_stock_path(stand_ins, any_width, transformer):
    block, kwargs = block_call(transformer)
    with torch.no_grad():
        stock = block(**kwargs)
        handle = ltx2_fastpath.enable(transformer)
        kwargs |= {name: kwargs[name].as_subclass(Subclass) for name in ("hidden_states", "audio_hidden_states")}
        outputs = block(**kwargs)
    assert equal([output.as_subclass(torch.Tensor) for output in outputs], stock) and stand_ins.total() == 0
    assert handle.stock_calls["block", "the hidden states are a Subclass"] == 1
