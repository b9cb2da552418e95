"""The block's forward: the arithmetic of ``LTX2VideoTransformerBlock.forward``, its steps grouped so that each is one launch.

Between two submodules the stock block adds an update to the residual stream, normalises it and modulates it, in up to nine
launches; here that is one op. A residual is therefore not added where the stock code adds it, but at the start of the next step.
"""

import functools

from ltx2_fastpath.ops.numerics import IndexedRows, full

from .host import transformer_ltx2
from .streams import AudioStreams, Together


def make_forward(fast):
    """The replacement forward for the blocks of one transformer; its sites are `fast.sites`."""
    stock = transformer_ltx2.LTX2VideoTransformerBlock.forward
    sites = fast.sites
    prefix = sites["guidance.prefix"]
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
        if (current := prefix.current()) is not None:
            skipped, hidden_states, audio_hidden_states = current.at_block(hidden_states, audio_hidden_states)
            if skipped:
                return hidden_states, audio_hidden_states
        reason = fast.why_not(hidden_states) or fast.why_not(audio_hidden_states)
        if reason is None and len(temb.index if isinstance(temb, IndexedRows) else temb) != len(hidden_states):
            # A cache without contexts (PAB) hands the outputs of one guidance pass to another. The host raises, so must we.
            reason = "the batch of the hidden states is not that of the timesteps"
        if reason is not None:
            fast.count_stock("block", reason)
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
        prompt_pairs = self.cross_attn_adaln and temb_prompt is not None and temb_prompt_audio is not None
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
            prompt_ada = _prompt_modulation(self, self.prompt_scale_shift_table, temb_prompt, video)
            audio_prompt_ada = _prompt_modulation(self, self.audio_prompt_scale_shift_table, temb_prompt_audio, audio)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = video_ada[:6]
        audio_shift_msa, audio_scale_msa, audio_gate_msa, audio_shift_mlp, audio_scale_mlp, audio_gate_mlp = audio_ada[:6]

        with streams.beside(self, video.device) if fast.audio_stream else Together() as beside:
            # 1. Video: self-attention, then text cross-attention.
            normed = sites["norm1"](self.norm1, video, scale_msa, shift_msa)
            video_update = self.attn1(
                hidden_states=normed,
                encoder_hidden_states=None,
                query_rotary_emb=video_rotary_emb,
                attention_mask=self_attention_mask,
                **perturbation,
            )
            modulations: tuple = ()
            text, video_gate = encoder_hidden_states, None
            if prompt_ada is not None:
                shift, scale = prompt_ada
                text = sites["text"](None, text, scale, shift)
            if self.video_cross_attn_adaln:
                shift, scale, video_gate = video_ada[6:9]
                modulations = ((scale, shift),)
            video, normed = sites["norm2"](self.norm2, video, video_update, gate_msa, *modulations)
            video_update = self.attn2(
                normed, encoder_hidden_states=text, query_rotary_emb=None, attention_mask=encoder_attention_mask
            )

            # 2. Audio: the same.
            with beside.audio():
                normed = sites["audio_norm1"](self.audio_norm1, audio, audio_scale_msa, audio_shift_msa)
                audio_update = self.audio_attn1(
                    hidden_states=normed,
                    encoder_hidden_states=None,
                    query_rotary_emb=audio_rotary_emb,
                    attention_mask=audio_self_attention_mask,
                    **perturbation,
                )
                modulations = ()
                audio_text, audio_gate = audio_encoder_hidden_states, None
                if audio_prompt_ada is not None:
                    shift, scale = audio_prompt_ada
                    audio_text = sites["audio_text"](None, audio_text, scale, shift)
                if self.audio_cross_attn_adaln:
                    shift, scale, audio_gate = audio_ada[6:9]
                    modulations = ((scale, shift),)
                audio, normed = sites["audio_norm2"](self.audio_norm2, audio, audio_update, audio_gate_msa, *modulations)
                audio_update = self.audio_attn2(
                    normed, encoder_hidden_states=audio_text, query_rotary_emb=None, attention_mask=audio_encoder_attention_mask
                )

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
            video, normed = _step(sites, "norm3", self.norm3, video, video_update, video_gate, scale_mlp, shift_mlp)
            video = sites["residual"](None, video, self.ff(normed), gate_mlp)
            with beside.audio():
                audio, audio_normed = _step(
                    sites, "audio_norm3", self.audio_norm3, audio, audio_update, audio_gate, audio_scale_mlp, audio_shift_mlp
                )
                audio = sites["audio_residual"](None, audio, self.audio_ff(audio_normed), audio_gate_mlp)
        return video, audio

    return forward


def _prompt_modulation(block, table, temb_prompt, like):
    """(shift, scale) of one prompt where the block's ada values do not hold them: without a timestep the table alone serves."""
    if temb_prompt is not None:
        return block.get_mod_params(table, temb_prompt, like.shape[0])
    return table[None, None].to(device=like.device, dtype=like.dtype).unbind(dim=2)


def _step(sites, name, norm, hidden, update, gate, scale, shift):
    """Residual (if the step before left an update), norm and modulation. -> (hidden, normed)"""
    if update is None:
        return hidden, sites[f"{name}.without_residual"](norm, hidden, scale, shift)
    return sites[name](norm, hidden, update, gate, (scale, shift))
