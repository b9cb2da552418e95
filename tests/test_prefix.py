"""Guidance prefix reuse and whatever may come between the passes of a step, or after their bits were found to be the same."""

import contextlib
import gc
import inspect
import types

import pytest
import setups
import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers import transformer_ltx2
from ltx2_fastpath.patches.transformer.guidance import _copied
from peft import LoraConfig

import ltx2_fastpath
from ltx2_fastpath.testing import models

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("stand_ins", "any_width")]
LAYERS, PERTURBED = 3, 2


class Step:
    """The CFG and STG passes of one transformer; after `__init__` the fast one reuses the prefix."""

    def __init__(self, fast: bool, transformer=None):
        self.transformer = transformer or setups.tiny(num_layers=LAYERS, dtype=torch.bfloat16)
        self.prefix = ltx2_fastpath.enable(self.transformer).sites["guidance.prefix"] if fast else None
        stg = models.inputs(self.transformer, **setups.SMALL, guidance="stg", given_latents=True)
        self.stg = stg | dict(spatio_temporal_guidance_blocks=[PERTURBED])
        self.cfg = setups.two_rows(stg)
        for _ in range(3):
            self.run()
        if fast:
            assert self.prefix.fast == 1, self.prefix.notes

    def run(self, between=lambda transformer: None):
        """What both passes give, with a call of `between` in between."""
        first = setups.run(self.transformer, **self.cfg)
        between(self.transformer)
        return first, setups.run(self.transformer, **self.stg)


@pytest.fixture
def steps():
    return Step(fast=False), Step(fast=True)


def check(stock, fast, **options):
    for expected, found in zip(stock.run(**options), fast.run(**options)):
        assert setups.equal(found, expected)


def add_adapter(transformer, **options):
    torch.manual_seed(0)
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False, **options))


def counted(function):
    """`function`, whose results are another at every call."""
    calls = iter(range(1, 1000))

    def wrapper(*args, **kwargs):
        result, factor = function(*args, **kwargs), 1 + 0.01 * next(calls)
        return tuple(x * factor for x in result) if isinstance(result, tuple) else result * factor

    return wrapper


def stock_block(transformer):
    block = transformer.transformer_blocks[0]
    block.forward = types.MethodType(transformer_ltx2.LTX2VideoTransformerBlock.forward, block)


def wrapped_block(transformer):
    block = transformer.transformer_blocks[0]
    block.forward = counted(block.forward)


def wrapped_attention(transformer):
    attention = transformer.transformer_blocks[0].attn1
    attention.forward = counted(attention.forward)


def hook_before_the_blocks(transformer):
    change = counted(lambda x: x)
    transformer.proj_in.register_forward_hook(lambda module, args, output: change(output))


def processor_with_a_state(transformer):
    class Counting(transformer_ltx2.LTX2PerturbedAttnProcessor):
        def __init__(self):
            super().__init__()
            self.compute = counted(super().__call__)

        def __call__(self, *args, **kwargs):
            return self.compute(*args, **kwargs)

    transformer.transformer_blocks[0].attn1.set_processor(Counting())


@pytest.mark.parametrize(
    "change", [stock_block, wrapped_block, wrapped_attention, hook_before_the_blocks, processor_with_a_state]
)
def test_changed_after_it_was_reused(steps, change):
    for step in steps:
        change(step.transformer)
    for _ in range(2):
        check(*steps)
    assert steps[1].prefix.fast == 1


def test_dropout_that_is_active_in_a_submodule(steps):
    for step in steps:
        add_adapter(step.transformer, lora_dropout=0.5)
        assert not step.transformer.training
    for _ in range(3):
        outputs = []
        for step in steps:
            torch.manual_seed(0)
            outputs += step.run()
        assert setups.equal(outputs[0], outputs[2]) and setups.equal(outputs[1], outputs[3])
    assert "a dropout is in training mode" in steps[1].prefix.notes and steps[1].prefix.fast == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda transformer: transformer.transformer_blocks[0].ff.net[2].weight.mul_(1.5),
        lambda transformer: transformer.transformer_blocks[0].attn1.processor.__setattr__("_attention_backend", "_native_math"),
    ],
    ids=["weights", "the backend of a processor"],
)
def test_changed_between_the_passes(steps, change):
    with torch.no_grad():
        check(*steps, between=change)
    assert steps[1].prefix.fast == 1  # as before the change: nothing is shared across it


def test_another_attention_backend_for_one_of_the_passes(steps):
    outputs = []
    for step in steps:
        with contextlib.ExitStack() as stack:
            context = attention_backend("_native_math")
            outputs += step.run(between=lambda transformer, context=context, stack=stack: stack.enter_context(context))
    assert setups.equal(outputs[0], outputs[2]) and setups.equal(outputs[1], outputs[3])
    assert steps[1].prefix.fast == 1


def test_weights_whose_changes_cannot_be_seen():
    def transformer():
        transformer = setups.tiny(num_layers=LAYERS, dtype=torch.bfloat16)
        with torch.inference_mode():
            for module in transformer.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[name] = torch.nn.Parameter(parameter.clone(), requires_grad=False)
        return transformer

    def change(transformer):
        with torch.inference_mode():
            transformer.transformer_blocks[0].ff.net[2].weight.mul_(1.5)

    stock = Step(fast=False, transformer=transformer())
    ours = transformer()
    prefix = ltx2_fastpath.enable(ours).sites["guidance.prefix"]
    for _ in range(3):
        setups.run(ours, **stock.cfg)
        setups.run(ours, **stock.stg)
    assert prefix.fast == 0 and any("inference tensors" in note for note in prefix.notes)
    expected = stock.run(between=change)
    assert setups.equal(setups.run(ours, **stock.cfg), expected[0])
    change(ours)
    assert setups.equal(setups.run(ours, **stock.stg), expected[1])


def test_bits_are_compared_again_with_an_adapter(steps):
    """Its matrix products have a height of their own, for which other kernels may be chosen."""
    for step in steps:
        add_adapter(step.transformer)
    prefix = steps[1].prefix
    before = prefix.stock
    check(*steps)
    assert (prefix.fast, prefix.stock) == (1, before + 1)
    check(*steps)
    assert prefix.fast == 2


def test_zeros_prove_nothing():
    """The first layer makes its bias of them, however its input lies in memory."""
    stock, fast = setups.tiny(num_layers=LAYERS, dtype=torch.bfloat16), setups.tiny(num_layers=LAYERS, dtype=torch.bfloat16)
    prefix = ltx2_fastpath.enable(fast).sites["guidance.prefix"]
    stg = models.inputs(stock, **setups.SMALL, guidance="stg") | dict(spatio_temporal_guidance_blocks=[PERTURBED])
    assert not stg["hidden_states"].is_contiguous()
    for scale in (0, 0, 0, 0, 1, 1, 1):
        scaled = stg | {name: stg[name] * scale for name in ("hidden_states", "audio_hidden_states")}
        for kwargs in (setups.two_rows(scaled), scaled):
            assert setups.equal(setups.run(fast, **kwargs), setups.run(stock, **kwargs))
    assert prefix.fast == 0


def test_what_is_kept_in_vain_is_dropped(steps):
    _, fast = steps
    for kept in (1, 2, 0, 0):  # modular pipelines make two such passes in a step
        setups.run(fast.transformer, **fast.cfg)
        assert len(fast.prefix._current.kept) == kept


def test_passes_with_the_fast_path_off_are_not_counted(steps):
    _, fast = steps
    before = fast.prefix.fast, fast.prefix.stock
    with ltx2_fastpath.disabled(fast.transformer):
        fast.run()
    assert (fast.prefix.fast, fast.prefix.stock) == before


def test_an_expanded_mask_is_kept_as_one_row():
    mask = torch.rand(1, 64, 64).expand(2, -1, -1)
    copied = _copied(mask)
    assert torch.equal(copied, mask) and copied.untyped_storage().nbytes() == 64 * 64 * 4
    assert copied.data_ptr() != mask.data_ptr()


def test_a_pass_without_rows_gives_the_stock_result_or_error(steps):
    for step in steps:
        step.stg = {name: value[:0] if torch.is_tensor(value) else value for name, value in step.stg.items()}
    outcomes = [setups.outcome(step.run) for step in steps]
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("quality", ["lossless", "high"])
def test_adapter_scales_by_position_are_ignored_as_in_stock(steps, quality):
    """The host scales LoRAs by keyword arguments alone."""
    transformer, stg = steps[1].transformer, steps[1].stg
    add_adapter(transformer)
    bound = inspect.signature(transformer.forward).bind(**stg | dict(attention_kwargs={"scale": 0.25}))
    bound.apply_defaults()
    with ltx2_fastpath.quality(transformer, quality), torch.no_grad(), transformer.cache_context("cond_uncond"):
        in_full, quarter = transformer(**stg), transformer(**bound.arguments)
        by_position = transformer(*bound.arguments.values())
    assert setups.equal(by_position, in_full) and not setups.equal(by_position, quarter)


def test_passes_that_scale_adapters_differently_share_nothing(steps):
    """By keyword in one pass and by position in the other: the same arguments, and another result."""
    for step in steps:
        add_adapter(step.transformer)
        bound = inspect.signature(step.transformer.forward).bind(**step.stg | dict(attention_kwargs={"scale": 0.25}))
        bound.apply_defaults()
        step.cfg |= dict(attention_kwargs={"scale": 0.25})
        step.by_position = tuple(bound.arguments.values())
    for _ in range(3):
        outputs = []
        for step in steps:
            with torch.no_grad(), step.transformer.cache_context("cond_uncond"):
                step.transformer(**step.cfg)
                outputs.append(step.transformer(*step.by_position))
        assert setups.equal(*outputs)


@pytest.mark.parametrize("attribute, value", [("base_num_frames", 5), ("theta", 100.0)])
def test_tables_follow_the_attributes_of_their_module(steps, attribute, value):
    before = steps[0].run()
    for step in steps:
        setattr(step.transformer.rope, attribute, value)
    check(*steps)
    assert not setups.equal(steps[0].run()[0], before[0])


def test_traced_by_torch_jit_and_transformed_by_torch_func(steps):
    stock, fast = steps
    results = []
    for transformer in (stock.transformer, fast.transformer):

        def forward(latents, transformer=transformer):
            return transformer(**stock.stg | dict(hidden_states=latents))[0]

        with torch.no_grad():
            traced = torch.jit.trace(forward, stock.stg["hidden_states"], check_trace=False)
            results.append((traced(stock.stg["hidden_states"]), torch.func.vmap(forward)(stock.stg["hidden_states"][None])))
    assert setups.equal(*results)


def test_a_hook_in_the_embedding_of_distinct_timesteps():
    long = dict(height=512, width=512, num_frames=25, image_to_video=True)
    transformers = setups.tiny(), setups.tiny()
    handle = ltx2_fastpath.enable(transformers[1])
    for _ in range(2):
        stock, fast = (setups.step(transformer, **long) for transformer in transformers)
        assert setups.equal(fast, stock)
    assert handle.sites["time_embed.distinct"].fast == 1
    for transformer in transformers:
        transformer.time_embed.linear.register_forward_hook(
            lambda module, args, output: output + torch.arange(len(output)).view(-1, 1) / 1000
        )
    stock, fast = (setups.step(transformer, **long) for transformer in transformers)
    assert setups.equal(fast, stock) and handle.sites["time_embed.distinct"].fast == 1


def test_a_hook_on_the_embedding_of_distinct_timesteps_sees_tensors():
    transformer = setups.tiny()
    ltx2_fastpath.enable(transformer)
    seen = []
    transformer.time_embed.register_forward_hook(lambda module, args, output: seen.append([type(x) for x in output]))
    for _ in range(3):
        setups.step(transformer, height=512, width=512, num_frames=25, image_to_video=True)
    assert seen == 3 * [[torch.Tensor, torch.Tensor]]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("interrupted", ["the pass that keeps", "the STG pass", "between them"])
def test_an_interrupted_call_leaves_no_states_behind(steps, error, interrupted):
    """220 MiB at 14,080 tokens, which the thread may not need again for hours."""
    _, fast = steps

    def call():
        prompt = fast.cfg["encoder_hidden_states"].clone()  # a call's own, gone when it has been interrupted
        if interrupted == "the pass that keeps":
            prompt_of_stg, fails = None, fast.transformer.transformer_blocks[PERTURBED]
        else:
            prompt_of_stg, fails = fast.stg, fast.transformer.proj_out
        setups_run = setups.run
        if interrupted != "the pass that keeps":
            setups_run(fast.transformer, **fast.cfg | dict(encoder_hidden_states=prompt))
            assert any(kept.holds for kept in fast.prefix._current.kept)
        if interrupted == "between them":
            raise error("interrupted")

        def raises(*args, **kwargs):
            raise error("interrupted")

        forward, vars(fails)["forward"] = fails.forward, raises
        try:
            setups_run(fast.transformer, **prompt_of_stg or fast.cfg | dict(encoder_hidden_states=prompt))
        finally:
            fails.forward = forward

    with pytest.raises(error, match="interrupted"):
        call()
    gc.collect()
    assert not any(kept.holds or kept.arguments for kept in fast.prefix._current.kept)
