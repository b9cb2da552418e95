"""Inputs of every shape, layout and value that pipelines and users pass: the host's results, or its own error."""

import pytest
import setups
import torch
from ltx2_fastpath.patches.transformer import host, rope
from setups import Together, equal_bits, fast_at, outcome

from ltx2_fastpath import enable, report
from ltx2_fastpath.testing import models

pytestmark = pytest.mark.usefixtures("any_width")


@pytest.fixture
def both(stand_ins, version):
    pair = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny(version)))
    enable(pair.ours)
    return pair


def inputs(pair, **options) -> dict:
    return models.inputs(pair.stock.transformer, **setups.SMALL | options)


def check_kwargs(pair, **kwargs):
    return pair.check(lambda pipe: setups.run(pipe.transformer, **kwargs))


def check_same_outcome(pair, **kwargs):
    """The same bits, or the same type of error. Returns the host's."""
    stock, ours = (outcome(lambda pipe=pipe: setups.run(pipe.transformer, **kwargs)) for pipe in (pair.stock, pair.ours))
    if isinstance(stock[0], type):
        assert stock[0] is ours[0], (stock, ours)
    else:
        assert setups.equal(stock, ours)
    return stock


class TestTimesteps:
    def test_per_token_and_per_row_in_turn(self, both):
        for _ in range(2):
            for batch_size in (1, 2):
                both.check(batch_size=batch_size)
                both.check(batch_size=batch_size, image_to_video=True)
        assert report(both.ours).stock_calls == {}

    def test_one_timestep_for_each_token(self, both):
        kwargs = inputs(both, batch_size=2)
        tokens = kwargs["hidden_states"].shape[1]
        timestep = torch.linspace(0, 1000, 2 * tokens).view(2, tokens)
        for _ in range(2):
            check_kwargs(both, **kwargs | dict(timestep=timestep, audio_timestep=timestep[:, 0]))
            check_kwargs(both, **kwargs | dict(timestep=timestep[:, :1], audio_timestep=timestep[:, 0]))

    def test_per_token_timesteps_of_the_audio(self, both):
        kwargs = inputs(both, batch_size=2)
        tokens = kwargs["audio_hidden_states"].shape[1]
        timestep = torch.linspace(0, 1000, 2 * tokens).view(2, tokens)
        for _ in range(2):
            check_kwargs(both, **kwargs | dict(audio_timestep=timestep, audio_sigma=torch.tensor([700.0, 300.0])))

    def test_rows_of_different_timesteps(self, both):
        kwargs = inputs(both, batch_size=2)
        timestep = torch.tensor([900.0, 100.0])
        for _ in range(2):
            check_kwargs(both, **kwargs | dict(timestep=timestep, sigma=timestep.flip(0)))

    @pytest.mark.parametrize("distinct", [1, 64, 65])
    def test_many_tokens_with_few_and_many_timesteps(self, both, distinct):
        """From 1,024 on, distinct timesteps are embedded once; what is different at 65 must not show."""
        kwargs = inputs(both, height=512, width=512, num_frames=25)
        tokens = kwargs["hidden_states"].shape[1]
        assert tokens == 1024
        timestep = (torch.arange(tokens) % distinct).float()[None]
        for i in range(3):
            check_kwargs(both, **kwargs | dict(timestep=timestep + i, audio_timestep=torch.tensor([500.0])))

    def test_cross_timestep_and_without_it(self, both):
        for use in (True, False, True):
            check_kwargs(both, **inputs(both) | dict(use_cross_timestep=use))


class TestMasks:
    def test_prompt_mask_with_padding(self, both):
        kwargs = inputs(both, batch_size=2)
        mask = kwargs["encoder_attention_mask"].clone()
        mask[0, 9:] = 0
        for _ in range(2):
            check_kwargs(both, **kwargs | dict(encoder_attention_mask=mask))
            check_kwargs(both, **kwargs | dict(audio_encoder_attention_mask=mask.flip(0)))
        plain = setups.run(both.ours.transformer, **kwargs)
        assert not setups.equal(plain, setups.run(both.ours.transformer, **kwargs | dict(encoder_attention_mask=mask)))

    def test_mask_that_changes_in_place(self, both):
        """The same tensor, at the same address, with other values."""
        kwargs = inputs(both)
        mask = kwargs["encoder_attention_mask"].clone()
        outputs = []
        for cut in (16, 9, 4):
            mask[:, cut:] = 0
            check_kwargs(both, **kwargs | dict(encoder_attention_mask=mask, audio_encoder_attention_mask=mask))
            outputs.append(setups.run(both.ours.transformer, **kwargs | dict(encoder_attention_mask=mask)))
        assert not setups.equal(outputs[0], outputs[1]) and not setups.equal(outputs[1], outputs[2])

    @pytest.mark.parametrize("value", [True, 1.0])
    def test_masks_of_other_dtypes_and_none(self, both, value):
        kwargs = inputs(both)
        mask = torch.full_like(kwargs["encoder_attention_mask"], value, dtype=torch.tensor(value).dtype)
        check_same_outcome(both, **kwargs | dict(encoder_attention_mask=mask))
        check_kwargs(both, **kwargs | dict(encoder_attention_mask=None, audio_encoder_attention_mask=None))
        bias = torch.zeros(1, 1, mask.shape[1])
        bias[..., 5:] = -10000.0
        check_kwargs(both, **kwargs | dict(encoder_attention_mask=bias))  # a bias already

    def test_video_self_attention_mask(self, both):
        kwargs = inputs(both, batch_size=2)
        tokens = kwargs["hidden_states"].shape[1]
        mask = torch.ones(2, tokens, tokens)
        mask[:, : tokens // 2, tokens // 2 :] = 0.25
        mask[1, -3:, :4] = 0
        for _ in range(2):
            check_kwargs(both, **kwargs | dict(video_self_attention_mask=mask))


class TestGuidance:
    def test_passes_in_every_order(self, both):
        """The pipelines' order, its reverse, and passes left out, at batch sizes that a shared prefix could confuse."""
        orders = [
            "cfg stg isolated",
            "isolated stg cfg",
            "stg stg cfg cfg stg",
            "cfg isolated stg stg",
            "stg cfg stg isolated stg",
        ]
        for order in orders:
            for guidance in order.split():
                both.check(guidance=guidance, batch_size=2 if guidance == "cfg" else 1)

    @pytest.mark.parametrize("mask", [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.5, 0.0]])
    def test_perturbation_of_some_rows(self, both, mask):
        kwargs = inputs(both, batch_size=2, guidance="stg")
        outputs = []
        for shape in ((2,), (2, 1, 1)):
            perturbation = torch.tensor(mask).view(shape)
            for _ in range(2):
                check_kwargs(both, **kwargs | dict(perturbation_mask=perturbation))
            outputs.append(setups.run(both.ours.transformer, **kwargs | dict(perturbation_mask=perturbation)))
        plain = setups.run(both.ours.transformer, **kwargs | dict(spatio_temporal_guidance_blocks=None))
        assert setups.equal(*outputs)
        # 2.0 ignores perturbations; a row that keeps its weight of 1 is computed as without.
        perturbed = both.stock.transformer.config.perturbed_attn
        for row in range(2):
            same = torch.equal(outputs[0][0][row], plain[0][row])
            assert same or (perturbed and mask != [1.0, 1.0])
        assert setups.equal(outputs[0], plain) == (not perturbed or mask == [1.0, 1.0])

    @pytest.mark.parametrize("blocks", [[0], [1], [0, 1], [1, 0], [5], []])
    def test_perturbed_blocks(self, both, blocks):
        for _ in range(3):
            both.check(batch_size=2)
            check_kwargs(both, **inputs(both, guidance="stg") | dict(spatio_temporal_guidance_blocks=blocks))

    def test_isolated_modalities_with_per_token_timesteps(self, both):
        for _ in range(2):
            both.check(guidance="isolated", image_to_video=True)
            both.check(guidance="stg", image_to_video=True)

    def test_latents_that_change_in_place_between_passes(self, both):
        """What the first pass left must not serve a second whose inputs are the same tensors with other values."""
        kwargs = inputs(both)
        for _ in range(4):
            check_kwargs(both, **kwargs)
            check_kwargs(both, **kwargs | dict(spatio_temporal_guidance_blocks=[1]))
        reused = fast_at(both.ours, "guidance.prefix")
        assert reused > 0
        for _ in range(2):
            check_kwargs(both, **kwargs)
            for name in ("hidden_states", "encoder_hidden_states", "audio_hidden_states"):
                kwargs[name].mul_(1.01)
            check_kwargs(both, **kwargs | dict(spatio_temporal_guidance_blocks=[1]))
        assert fast_at(both.ours, "guidance.prefix") == reused

    def test_weights_that_change_between_passes(self, both):
        kwargs = inputs(both)
        for _ in range(4):
            check_kwargs(both, **kwargs)
            check_kwargs(both, **kwargs | dict(spatio_temporal_guidance_blocks=[1]))
        reused = fast_at(both.ours, "guidance.prefix")
        assert reused > 0
        for name in ("scale_shift_table", "ff.net.2.weight", "attn1.to_q.weight", "attn2.to_v.bias"):
            check_kwargs(both, **kwargs)
            for pipe in (both.stock, both.ours):
                pipe.transformer.transformer_blocks[0].get_parameter(name).mul_(1.1)
            check_kwargs(both, **kwargs | dict(spatio_temporal_guidance_blocks=[1]))
        check_kwargs(both, **kwargs)
        for pipe in (both.stock, both.ours):
            pipe.transformer.proj_in.weight.mul_(1.1)
        check_kwargs(both, **kwargs | dict(spatio_temporal_guidance_blocks=[1]))
        assert fast_at(both.ours, "guidance.prefix") == reused


class TestLayouts:
    def test_latents_channel_by_channel_and_sliced(self, both):
        kwargs = inputs(both)
        video, audio = kwargs["hidden_states"], kwargs["audio_hidden_states"]
        check_kwargs(both, **kwargs | dict(hidden_states=video.transpose(1, 2).contiguous().transpose(1, 2)))
        wide = torch.cat([video, video * 2], dim=2)
        long = torch.cat([audio, audio * 2], dim=1)
        for _ in range(2):
            check_kwargs(both, **kwargs | dict(hidden_states=wide[..., 4:], audio_hidden_states=long[:, audio.shape[1] :]))

    def test_prompts_sliced_and_expanded(self, both):
        kwargs = inputs(both, batch_size=2)
        prompt = kwargs["encoder_hidden_states"]
        twice = torch.cat([prompt, prompt], dim=1)
        check_kwargs(both, **kwargs | dict(encoder_hidden_states=twice[:, ::2]))
        check_kwargs(both, **kwargs | dict(encoder_hidden_states=prompt[:1].expand_as(prompt)))

    def test_block_called_with_odd_layouts(self, both):
        """Strided ada rows, sliced hidden states, rotary tables of another layout and a plain tuple of them."""
        transformer = both.stock.transformer
        passed = []
        hook = transformer.transformer_blocks[0].register_forward_pre_hook(
            lambda module, args, kwargs: passed.append(kwargs), with_kwargs=True
        )
        setups.step(transformer, batch_size=2, image_to_video=True)
        hook.remove()
        (kwargs,) = passed

        def strided(tensor):
            return torch.stack([tensor, tensor], dim=-1)[..., 0]  # no dimension is contiguous

        def padded(tensor):
            return torch.cat([tensor, tensor], dim=1)[:, : tensor.shape[1]]

        tembs = [name for name in kwargs if name.startswith("temb")]
        ropes = [name for name in kwargs if name.endswith("rotary_emb")]
        variants = [
            {},
            {name: strided(kwargs[name]) for name in tembs if kwargs[name] is not None},
            {name: padded(kwargs[name]) for name in tembs if kwargs[name] is not None},
            {name: tuple(table.contiguous() for table in kwargs[name]) for name in ropes},
            {name: tuple(map(strided, kwargs[name])) for name in ropes},
            {name: list(kwargs[name]) for name in ropes},
            {"hidden_states": strided(kwargs["hidden_states"])},
            {"hidden_states": padded(kwargs["hidden_states"]), "audio_hidden_states": padded(kwargs["audio_hidden_states"])},
            {"encoder_hidden_states": strided(kwargs["encoder_hidden_states"])},
            {"use_a2v_cross_attention": False},
            {"use_v2a_cross_attention": False},
            {"use_a2v_cross_attention": False, "use_v2a_cross_attention": False},
        ]
        for variant in variants:

            def call(pipe, variant=variant):
                with torch.no_grad():
                    return pipe.transformer.transformer_blocks[0](**kwargs | variant)

            for _ in range(2):
                both.check(call)

        def positional(pipe):
            with torch.no_grad():
                return pipe.transformer.transformer_blocks[0](*kwargs.values())

        both.check(positional)

    def test_inputs_are_not_written_to(self, both):
        kwargs = inputs(both, batch_size=2, image_to_video=True)
        before = {name: value.clone() for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        for _ in range(2):
            check_kwargs(both, **kwargs)
        assert all(equal_bits(kwargs[name], value) for name, value in before.items())

    def test_outputs_are_not_written_to_by_later_calls(self, both):
        kept = [setups.step(both.ours.transformer, seed=seed) for seed in (0, 1)]
        copies = [[tensor.clone() for tensor in output] for output in kept]
        for seed in (2, 3):
            both.check(seed=seed)
        assert all(map(setups.equal, kept, copies))

    @pytest.mark.parametrize(
        "change",
        [
            dict(audio_hidden_states=torch.zeros(1, 0, 4), audio_num_frames=0, audio_coords=torch.zeros(1, 1, 0, 2)),
            dict(audio_hidden_states=torch.zeros(1, 0, 4), audio_num_frames=0, audio_coords=None),
            dict(hidden_states=torch.zeros(1, 0, 4), video_coords=torch.zeros(1, 3, 0, 2)),
            dict(hidden_states=torch.zeros(1, 5, 4)),
            dict(hidden_states=torch.zeros(1, 12, 4, dtype=torch.float16)),
            dict(hidden_states=torch.zeros(2, 12, 4)),
            dict(encoder_hidden_states=torch.zeros(1, 0, 16), encoder_attention_mask=torch.zeros(1, 0)),
            dict(timestep=torch.zeros(3)),
            dict(timestep=None),
            dict(video_coords=None, audio_coords=None),
            dict(video_coords=torch.zeros(1, 3, 12)),
            dict(unknown_argument=1),
        ],
        ids=lambda change: ", ".join(change),
    )
    def test_empty_and_wrong_inputs(self, both, change):
        kwargs = inputs(both)
        for _ in range(2):
            check_same_outcome(both, **kwargs | change)
        check_kwargs(both, **kwargs)  # and no trace of it afterwards

    def test_coordinates_that_change_in_place(self, both):
        kwargs = inputs(both)
        outputs = []
        first = kwargs["video_coords"].clone()
        for shift in (0.0, 1.5, 0.0):
            kwargs["video_coords"].copy_(first + shift)
            check_kwargs(both, **kwargs)
            outputs.append(setups.run(both.ours.transformer, **kwargs))
        assert not setups.equal(outputs[0], outputs[1]) and setups.equal(outputs[0], outputs[2])

    def test_coordinates_that_do_not_repeat(self, both):
        kwargs = inputs(both)
        kwargs["video_coords"] = torch.rand(kwargs["video_coords"].shape, generator=torch.Generator().manual_seed(0)) * 100
        for _ in range(2):
            check_kwargs(both, **kwargs)


class TestValues:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_nan_and_infinities_in_the_latents(self, stand_ins, version, dtype):
        both = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny(version, dtype=dtype)))
        enable(both.ours)
        kwargs = inputs(both, dtype=dtype)
        for value in (float("nan"), float("inf"), -float("inf")):
            for name in ("hidden_states", "audio_hidden_states", "encoder_hidden_states"):
                changed = kwargs[name].clone()
                changed[:, 2, 1] = value
                for _ in range(2):
                    check_kwargs(both, **kwargs | {name: changed})
        assert (
            setups.run(both.ours.transformer, **kwargs | dict(hidden_states=kwargs["hidden_states"] * float("nan")))[0]
            .isnan()
            .all()
        )

    def test_nan_everywhere_is_not_taken_for_a_fault(self, both, caplog):
        kwargs = inputs(both)
        for _ in range(2):
            check_kwargs(both, **kwargs | dict(hidden_states=torch.full_like(kwargs["hidden_states"], float("nan"))))
        check_kwargs(both, **kwargs)
        assert [record for record in caplog.records if record.name == "ltx2_fastpath"] == []

    @pytest.mark.parametrize("factor", [0.0, -0.0, 1e-30, 1e30])
    def test_extreme_magnitudes(self, both, factor):
        kwargs = inputs(both)
        for _ in range(2):
            check_kwargs(both, **kwargs | dict(hidden_states=kwargs["hidden_states"] * factor))

    @pytest.mark.parametrize("timestep", [float("nan"), float("inf"), 0.0, -5.0])
    def test_odd_timesteps(self, both, timestep):
        kwargs = inputs(both)
        value = torch.full_like(kwargs["timestep"], timestep)
        for _ in range(2):
            check_kwargs(both, **kwargs | dict(timestep=value, sigma=value))


def test_a_second_request_compares_its_coordinates_once(stand_ins, monkeypatch):
    """Each request makes its own coordinates: compared by value, which waits for the GPU, once, then known by their place."""
    transformer = setups.tiny("2.3")
    handle = enable(transformer)
    compared = []
    are = rope.Tables.are
    monkeypatch.setattr(rope.Tables, "are", lambda self, *args: compared.append(args) or are(self, *args))
    counts = []
    for _request in range(4):
        kwargs = models.inputs(transformer, **setups.SMALL)
        for _step in range(3):
            compared.clear()
            setups.run(transformer, **kwargs)
            counts.append(len(compared))
    assert [count > 0 for count in counts] == [False, False, False, *[True, False, False] * 3]
    assert [handle.sites[f"{name}.tables"].first for name in host.ROPES] == [1] * 4
