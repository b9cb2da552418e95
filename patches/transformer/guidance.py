"""The passes of a denoising step, and what they share: prefix reuse.

LTX-2.3's default call makes three forwards a step. The STG pass (spatio-temporal guidance) differs from the pass with the
positive prompt from its first perturbed block on, and only there. So the hidden states that enter that block are kept, and an STG
pass whose inputs are, by value, those of some rows of an earlier pass of the step starts at that block. Pipelines make the
unperturbed pass for both prompts at once (CFG), modular pipelines make one for each.

It is off until a request has shown that it makes STG passes, and until the prefix was run both ways at these shapes and gave the
same bits: that takes two steps of the first call. It is off, too, wherever something watches the blocks that would be skipped.
Where LTX2Pipeline draws the latents itself, the two passes have other bits in stock (high.py says why), and lossless reuses
nothing. Given latents lie alike in memory for both, and so do those of LTX2ConditionPipeline, LTX2InContextPipeline and of
modular pipelines.
"""

import copy
import functools
import threading
import weakref
from typing import Any

import torch

from ltx2_fastpath.first_sight import bits, remember, same_bits

from .survey import State, Survey

# Arguments that only tell what is perturbed, or how the result is wrapped.
_IGNORED = {"spatio_temporal_guidance_blocks", "perturbation_mask", "return_dict"}
_PASSES = 2  # without perturbation, that a step can make before its STG pass
_LAYOUTS = 256  # pairs of layouts that verdicts are kept of


class _Pass:
    """One forward on its way through the blocks; `at_block` is called by every block, in turn."""

    skips = False  # whether the blocks before `at` need not run

    def __init__(self, at: int):
        self.at = at
        self.next = 0

    def at_block(self, video, audio):
        """(whether to skip this block, its video input, its audio input)"""
        index = self.next
        self.next += 1
        if index == self.at:
            video, audio = self.arrive(video, audio)
        return self.skips and index < self.at, video, audio

    def arrive(self, video, audio):
        """Called at block `at` with what enters it; returns what shall enter it."""
        raise NotImplementedError


class _Keep(_Pass):
    """A pass whose states may serve a later one: keeps what enters block `at`.

    Of its arguments it keeps copies (34 MB at 14,080 tokens), because callers may change theirs in place between two passes. If
    `tied`, all goes with the caller's prompt: a call that was interrupted leaves nothing behind.
    """

    def __init__(self, at, arguments, layout, state, tied):
        super().__init__(at)
        self.arguments: dict = {name: _copied(value) for name, value in arguments.items()}
        self.layout = layout
        self.state: State = state
        self.video: Any = None
        self.audio: Any = None
        if tied:
            self._text = weakref.ref(arguments["encoder_hidden_states"], functools.partial(_release, weakref.ref(self)))

    @property
    def holds(self) -> bool:
        """Whether the pass has arrived, and its states are still there."""
        return self.video is not None

    def arrive(self, video, audio):
        self.video, self.audio = video, audio
        return video, audio


def _release(kept: "weakref.ref[_Keep]", _) -> None:
    if (mine := kept()) is not None:
        mine.video = mine.audio = None
        mine.arguments = {}


class _Check(_Pass):
    """An STG pass that runs in full and is compared, at block `at`, with the kept rows it would have started from."""

    def __init__(self, at, kept, verdict):
        super().__init__(at)
        self.kept = kept
        self.verdict = verdict

    def arrive(self, video, audio):
        self.verdict(same_bits((video, audio), self.kept))
        return video, audio


class _Reuse(_Pass):
    """An STG pass that starts at block `at` with the kept rows."""

    skips = True

    def __init__(self, at, kept):
        super().__init__(at)
        self.kept = kept

    def arrive(self, video, audio):
        return self.kept


class _Current(threading.local):
    """A thread's own: other threads run other requests, between whose passes theirs come, and may do so on other streams."""

    value: Any = None  # the pass that it is in
    at: int | None = None  # the first perturbed block of the STG passes seen
    before: tuple = ()  # the layouts of the last passes without perturbation since the last STG pass
    kept: tuple[_Keep, ...] = ()  # of those, what was kept
    tied: bool = True  # whether the caller's prompts live from a pass to the STG pass after it; all pipelines' do


class PrefixReuse:
    """What is kept between the passes of a step, and which layouts were verified.

    Attributes:
        site: its name in reports; fast: STG passes that started at the first perturbed block; stock: those that ran in full,
        `first` of them because they were compared; left_out: whether nothing is shared; notes: why, or how it was verified.
    """

    def __init__(self, site: str):
        self.site = site
        self.fast = 0
        self.stock = 0
        self.first = 0
        self.left_out = False
        self._notes: dict[str, None] = {}
        # (perturbed block, layout of a pass, layout of the STG pass after it, chunk of rows): whether both gave the same bits, as
        # far as it is known of the modules and settings that these were.
        self._verdicts: dict[tuple, bool] = {}
        self._found_with: tuple = ()
        self._current = _Current()

    @property
    def notes(self) -> list[str]:
        return sorted(self._notes)

    def current(self) -> _Pass | None:
        """The pass that this thread is in, or None."""
        return self._current.value

    def passing(self, parts, transformer, arguments) -> "_Passing":
        """A context for one forward: decides what its blocks do and remembers what it leaves."""
        return _Passing(self._current, None if self.left_out else self._plan(parts, transformer, arguments))

    def _note(self, text: str) -> None:
        remember(self._notes, text, None, _LAYOUTS)

    def _plan(self, parts, transformer, arguments) -> _Pass | None:
        stg_blocks, mine = arguments.get("spatio_temporal_guidance_blocks"), self._current
        if arguments.get("isolate_modalities") or parts.handle.why_not(arguments["hidden_states"]) is not None:
            return None
        layout = _layout(arguments)
        at = _first_perturbed(stg_blocks)
        if not stg_blocks:
            mine.before = (*mine.before, layout)[-_PASSES:]
            if mine.at is None:
                return None
        elif at is None or self._is_hopeless(at, layout):
            mine.at, mine.before, mine.kept = None, (), ()
            self.stock += 1
            return None
        survey = parts.stack.survey(transformer)
        reason = parts.stack.why_watched(transformer, survey) or survey.why_unforeseen()
        if reason is not None:
            mine.kept = ()
            if stg_blocks:
                mine.before = ()
                self.stock += 1
                self._note(reason)
            return None
        state = survey.state()
        self._forget_other_settings(survey, state)
        if not stg_blocks:
            return self._plan_keep(state, arguments, layout)
        return self._plan_stg(state, arguments, layout, at)

    def _is_hopeless(self, at, layout) -> bool:
        """Whether every pass of this step so far is known to have other bits than an STG pass of this layout."""
        before = self._current.before
        unequal = [verdict[:3] for verdict, equal in list(self._verdicts.items()) if not equal]
        return bool(before) and all((at, earlier, layout) in unequal for earlier in before)

    def _forget_other_settings(self, survey: Survey, state: State) -> None:
        """Drop the verdicts where modules or settings are others by now: other kernels may sum in another order."""
        found_with = weakref.ref(survey), state.settings
        if self._found_with != found_with:
            self._verdicts.clear()
            self._found_with = found_with

    def _plan_keep(self, state, arguments, layout) -> _Pass | None:
        mine = self._current
        mine.kept = tuple(kept for kept in mine.kept if kept.holds)
        if len(mine.kept) == _PASSES:  # in vain: there are no STG passes any more
            mine.at, mine.kept = None, ()
            return None
        return _Keep(mine.at, arguments, layout, state, mine.tied)

    def _plan_stg(self, state, arguments, layout, at) -> _Pass | None:
        mine = self._current
        passes, mine.kept, mine.before = mine.kept, (), ()
        mine.tied = mine.tied and all(kept.holds for kept in passes)
        if at != mine.at:
            mine.at, passes = at, ()
        if not passes or at == 0:
            self.stock += 1
            return None
        found = _equal_rows([kept for kept in passes if kept.holds and kept.state == state], arguments)
        if found is None:
            self.stock += 1
            self._note("the inputs or the weights were not those of a row of a pass before")
            return None
        kept, chunk = found
        rows = arguments["hidden_states"].shape[0]
        video, audio = (states[chunk * rows : (chunk + 1) * rows] for states in (kept.video, kept.audio))
        key = at, kept.layout, layout, chunk
        if self._verdicts.get(key):
            self.fast += 1
            return _Reuse(at, (video, audio))
        self.stock += 1
        self.first += 1

        def verdict(equal):
            how = "bit-equal both ways"
            if equal:
                if _is_constant(arguments["hidden_states"]) or _is_constant(arguments["audio_hidden_states"]):
                    return  # which shows nothing: every order of a sum of zeros gives the same bits
            else:
                how = "not bit-equal, so not reused"
                if kept.arguments["hidden_states"].is_contiguous() != arguments["hidden_states"].is_contiguous():
                    how += ' (in stock, too: the latents are laid out differently in memory; quality "high" lays them out alike)'
            remember(self._verdicts, key, equal, _LAYOUTS)
            self._note(f"blocks 0 to {at - 1} at {list(kept.video.shape)}: {how}")

        return _Check(at, (video, audio), verdict)


class _Passing:
    """The context of one forward: its `plan` is what the blocks ask, and what it kept is there for the pass after it."""

    def __init__(self, current: _Current, plan: _Pass | None):
        self._current = current
        self._plan = plan

    def __enter__(self):
        self._outer = self._current.value
        self._current.value = self._plan

    def __exit__(self, error_type, error, traceback):
        self._current.value = self._outer
        if error_type is not None:
            self._current.kept = ()
        elif isinstance(self._plan, _Keep) and self._plan.holds:
            self._current.kept = (*self._current.kept, self._plan)


def _first_perturbed(stg_blocks) -> int | None:
    """The first block that a pass perturbs; None where not all are numbers: stock takes a list with None."""
    try:
        return min(stg_blocks) if stg_blocks else None
    except TypeError:
        return None


def _equal_rows(passes: list[_Keep], arguments: dict) -> tuple[_Keep, int] | None:
    """Which pass had, in which rows, by value, the inputs of this one: chunk j is rows [j·b, (j+1)·b). One synchronisation."""
    candidates = [(kept, equal) for kept in passes if (equal := _equal_chunks(kept.arguments, arguments)) is not None]
    if not candidates:
        return None
    flags = torch.cat([equal for _, equal in candidates]).tolist()
    places = [(kept, chunk) for kept, equal in candidates for chunk in range(len(equal))]
    # The positive prompt comes last in a CFG pass.
    return next((place for place, equal in reversed(list(zip(places, flags))) if equal), None)


def _equal_chunks(kept: dict, arguments: dict) -> torch.Tensor | None:
    """For each chunk of the kept rows whether its inputs were these, on the device of the hidden states; None: none was."""
    rows = arguments["hidden_states"].shape[0]
    kept_rows = kept["hidden_states"].shape[0]
    if not rows or kept_rows % rows or kept.keys() != arguments.keys():
        return None
    flags = []
    for name in sorted(arguments.keys() - _IGNORED):
        before, now = kept[name], arguments[name]
        if not isinstance(now, torch.Tensor):
            if not _same_value(before, now):
                return None
            continue
        if not isinstance(before, torch.Tensor) or before.dtype != now.dtype or before.device != now.device:
            return None
        if before.shape[:1] != (kept_rows,) or now.shape != (rows, *before.shape[1:]):
            return None
        if before.stride(0) == 0:  # all rows are one
            before = before[:rows]
        chunks = bits(before).unflatten(0, (-1, rows)) == bits(now)
        equal = chunks.flatten(1).all(1).expand(kept_rows // rows)
        flags.append(equal.to(arguments["hidden_states"].device))
    return torch.stack(flags).all(0)


def _copied(value):
    """A copy; of tensors one that keeps rows that are one in memory (a mask of all tokens with all can have a gigabyte) one."""
    if not isinstance(value, torch.Tensor):
        return copy.copy(value)
    shared = value.ndim and len(value) > 1 and value.stride(0) == 0
    return value[:1].clone().expand_as(value) if shared else value.clone()


def _is_constant(x: torch.Tensor) -> bool:
    return bool((x == x.flatten()[:1]).all())


def _same_value(a, b) -> bool:
    try:
        return a is b or bool(a == b)
    except RuntimeError:  # tensors inside; they are not looked into
        return False


def _layout(arguments: dict) -> tuple:
    """Of every tensor in the arguments what a kernel may be chosen by."""
    tensors = ((name, value) for name, value in sorted(arguments.items()) if isinstance(value, torch.Tensor))
    return tuple((name, value.shape, value.stride(), value.dtype, value.device) for name, value in tensors)
