"""The block's forward: the arithmetic of ``LTX2VideoTransformerBlock.forward``, its steps grouped so that each is one launch.

Between two submodules the stock block adds an update to the residual stream, normalises it and modulates it, in up to nine
launches; here that is one op. A residual is therefore not added where the stock code adds it, but at the start of the next step.
Submodules are called in the stock order: what offloading prefetches, and leaves on the GPU, depends on it.
"""

import functools

from ltx2_fastpath.ops.support import IndexedRows, full

from . import hooks
from .host import transformer_ltx2
from .streams import AudioStreams, Together


def make_forward(parts):
    """The replacement forward for the blocks of one transformer."""
    stock = transformer_ltx2.LTX2VideoTransformerBlock.forward
    handle, sites, guidance = parts.handle, parts.ops, parts.guidance
    streams = AudioStreams()

    @functools.wraps(stock)
    def forward(
        self,
        hidden_states,
        audio_hidden_states,
        encoder_hidden_states,
        audio_encoder_hidden_states,
        temb,
        temb_audio,
        temb_ca_scale_shift,
        temb_ca_audio_scale_shift,
        temb_ca_gate,
        temb_ca_audio_gate,
        temb_prompt=None,
        temb_prompt_audio=None,
        video_rotary_emb=None,
        audio_rotary_emb=None,
        ca_video_rotary_emb=None,
        ca_audio_rotary_emb=None,
        encoder_attention_mask=None,
        audio_encoder_attention_mask=None,
        self_attention_mask=None,
        audio_self_attention_mask=None,
        a2v_cross_attention_mask=None,
        v2a_cross_attention_mask=None,
        use_a2v_cross_attention=True,
        use_v2a_cross_attention=True,
        perturbation_mask=None,
        all_perturbed=None,
    ):
        if (current := guidance.current()) is not None:
            skipped, hidden_states, audio_hidden_states = current.at_block(hidden_states, audio_hidden_states)
            if skipped:
                hooks.give_back(self)
                return hidden_states, audio_hidden_states
        reason = handle.why_not(hidden_states) or handle.why_not(audio_hidden_states)
        if reason is None and len(temb.index if isinstance(temb, IndexedRows) else temb) != len(hidden_states):
            # A cache without contexts (PAB) hands the outputs of one guidance pass to another. The host raises, so must we.
            reason = "the batch of the hidden states is not that of the timesteps"
        elif reason is None and (temb_prompt is None) != (temb_prompt_audio is None):
            reason = "one of the prompts has a timestep, the other none"
        if reason is not None:
            handle.count_stock("block", reason, self)
            temb, temb_audio, temb_ca_scale_shift, temb_ca_audio_scale_shift, temb_ca_gate, temb_ca_audio_gate = map(
                full, (temb, temb_audio, temb_ca_scale_shift, temb_ca_audio_scale_shift, temb_ca_gate, temb_ca_audio_gate)
            )
            return stock(
                self, hidden_states, audio_hidden_states, encoder_hidden_states, audio_encoder_hidden_states, temb, temb_audio,
                temb_ca_scale_shift, temb_ca_audio_scale_shift, temb_ca_gate, temb_ca_audio_gate, temb_prompt, temb_prompt_audio,
                video_rotary_emb, audio_rotary_emb, ca_video_rotary_emb, ca_audio_rotary_emb, encoder_attention_mask,
                audio_encoder_attention_mask, self_attention_mask, audio_self_attention_mask, a2v_cross_attention_mask,
                v2a_cross_attention_mask, use_a2v_cross_attention, use_v2a_cross_attention, perturbation_mask, all_perturbed,
            )  # fmt: skip

        video, audio = hidden_states, audio_hidden_states
        cross_modal = use_a2v_cross_attention or use_v2a_cross_attention
        perturbation = {}
        if self.perturbed_attn:
            perturbation = {"perturbation_mask": perturbation_mask, "all_perturbed": all_perturbed}

        # Ada values of the whole block.
        pairs = [(self.scale_shift_table, temb), (self.audio_scale_shift_table, temb_audio)]
        prompt_pairs = self.cross_attn_adaln and temb_prompt is not None
        if prompt_pairs:
            pairs += [
                (self.prompt_scale_shift_table, temb_prompt),
                (self.audio_prompt_scale_shift_table, temb_prompt_audio),
            ]
        if cross_modal:
            video_table = self.video_a2v_cross_attn_scale_shift_table
            audio_table = self.audio_a2v_cross_attn_scale_shift_table
            pairs += [
                (video_table[:4], temb_ca_scale_shift),
                (video_table[4:], temb_ca_gate),
                (audio_table[:4], temb_ca_audio_scale_shift),
                (audio_table[4:], temb_ca_audio_gate),
            ]
        video_ada, audio_ada, *rest = sites["ada_values"](*pairs)
        prompt_ada = audio_prompt_ada = None
        if prompt_pairs:
            prompt_ada, audio_prompt_ada, *rest = rest
        elif self.cross_attn_adaln:
            prompt_ada = _prompt_modulation(self.prompt_scale_shift_table, video)
            audio_prompt_ada = _prompt_modulation(self.audio_prompt_scale_shift_table, audio)

        alone = "switched off" if not handle.audio_stream else streams.why_not(self)
        if alone is not None:
            handle.count_partly("audio_stream", alone, self)
        with Together() if alone is not None else streams.beside(video.device) as beside:
            # 1. Self-attention of video and of audio.
            video_update = _attend_to_itself(
                self, sites, "", video, video_ada, video_rotary_emb, self_attention_mask, perturbation
            )
            with beside.audio():
                audio_update = _attend_to_itself(
                    self, sites, "audio_", audio, audio_ada, audio_rotary_emb, audio_self_attention_mask, perturbation
                )

            # 2. Text cross-attention.
            video, video_update, video_gate = _attend_to_text(
                self, sites, "", video, video_update, video_ada, encoder_hidden_states, prompt_ada, encoder_attention_mask
            )
            with beside.audio():
                audio, audio_update, audio_gate = _attend_to_text(
                    self, sites, "audio_", audio, audio_update, audio_ada,
                    audio_encoder_hidden_states, audio_prompt_ada, audio_encoder_attention_mask,
                )  # fmt: skip

            # 3. Audio-to-video and video-to-audio cross-attention, both from the streams as they are before either.
            if cross_modal:
                (video_a2v_scale, video_a2v_shift, video_v2a_scale, video_v2a_shift), (a2v_gate,) = rest[:2]
                (audio_a2v_scale, audio_a2v_shift, audio_v2a_scale, audio_v2a_shift), (v2a_gate,) = rest[2:]
                video, video_a2v, video_v2a = sites["audio_to_video_norm"](
                    self.audio_to_video_norm, video, video_update, video_gate,
                    (video_a2v_scale, video_a2v_shift), (video_v2a_scale, video_v2a_shift),
                )  # fmt: skip
                with beside.audio():
                    audio, audio_a2v, audio_v2a = sites["video_to_audio_norm"](
                        self.video_to_audio_norm, audio, audio_update, audio_gate,
                        (audio_a2v_scale, audio_a2v_shift), (audio_v2a_scale, audio_v2a_shift),
                    )  # fmt: skip
                beside.meet()
                video_update = audio_update = None
                if use_a2v_cross_attention:
                    video_gate = a2v_gate
                    video_update = self.audio_to_video_attn(
                        video_a2v,
                        encoder_hidden_states=audio_a2v,
                        query_rotary_emb=ca_video_rotary_emb,
                        key_rotary_emb=ca_audio_rotary_emb,
                        attention_mask=a2v_cross_attention_mask,
                    )
                if use_v2a_cross_attention:
                    audio_gate = v2a_gate
                    with beside.audio():
                        audio_update = self.video_to_audio_attn(
                            audio_v2a,
                            encoder_hidden_states=video_v2a,
                            query_rotary_emb=ca_audio_rotary_emb,
                            key_rotary_emb=ca_video_rotary_emb,
                            attention_mask=v2a_cross_attention_mask,
                        )

            # 4. Feed-forward.
            video = _feed_forward(self, sites, "", video, video_ada, video_update, video_gate)
            with beside.audio():
                audio = _feed_forward(self, sites, "audio_", audio, audio_ada, audio_update, audio_gate)
        return video, audio

    return forward


def _prompt_modulation(table, like):
    """(shift, scale) of a prompt without a timestep: the table alone serves."""
    return table[None, None].to(device=like.device, dtype=like.dtype).unbind(dim=2)


def _attend_to_itself(block, sites, stream, hidden, ada, rotary_emb, mask, perturbation):
    """Self-attention of one stream, "" for video or "audio_". -> the update that is to be added, times ada[2]"""
    shift, scale, _ = ada[:3]
    normed = sites[f"{stream}norm1"](getattr(block, f"{stream}norm1"), hidden, scale, shift)
    return getattr(block, f"{stream}attn1")(
        hidden_states=normed, encoder_hidden_states=None, query_rotary_emb=rotary_emb, attention_mask=mask, **perturbation
    )


def _attend_to_text(block, sites, stream, hidden, update, ada, text, prompt_ada, mask):
    """The residual of self-attention, then text cross-attention. -> (hidden, and an update and its gate to add)"""
    if prompt_ada is not None:
        shift, scale = prompt_ada
        text = sites[f"{stream}text"](None, text, scale, shift)
    modulations: tuple = ()
    gate = None
    if len(ada) > 6:  # since LTX-2.3 the queries of the text cross-attention are modulated too
        shift, scale, gate = ada[6:9]
        modulations = ((scale, shift),)
    hidden, normed = sites[f"{stream}norm2"](getattr(block, f"{stream}norm2"), hidden, update, ada[2], *modulations)
    update = getattr(block, f"{stream}attn2")(normed, encoder_hidden_states=text, query_rotary_emb=None, attention_mask=mask)
    return hidden, update, gate


def _feed_forward(block, sites, stream, hidden, ada, update, update_gate):
    """The residual that is still to be added (none if `update` is None), the feed-forward and its residual. -> hidden"""
    shift, scale, gate = ada[3:6]
    norm = getattr(block, f"{stream}norm3")
    if update is None:
        normed = sites[f"{stream}norm3.without_residual"](norm, hidden, scale, shift)
    else:
        hidden, normed = sites[f"{stream}norm3"](norm, hidden, update, update_gate, (scale, shift))
    return sites[f"{stream}residual"](None, hidden, getattr(block, f"{stream}ff")(normed), gate)
