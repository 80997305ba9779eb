"""Faults of captures: what a step sees in a trace that it would not see otherwise, and what is frozen in its graph."""

from __future__ import annotations

from mutations import Mutation

REDUCED = "tests/ranks/wrapped/test_what_ddp_reduces.py::test_each_rank_has_what_it_has_in_eager_code"

GENERATORS = "tests/unit/capture/reach/test_generators.py::test_nothing_that_is_drawn_is_frozen"
STATE = "tests/unit/capture/reach/test_train_state.py::test_the_step_sees_the_state_that_it_would_have_made"
GRADIENTS = "tests/unit/capture/guards/test_argument_gradients.py::test_a_gradient_from_before_the_call_is_seen"
WARM_SIZES = "tests/behaviour/warm/test_moving_sizes.py"
SETTLED = "tests/behaviour/warm/test_settled_writes.py::test_what_a_step_sets_it_sets_again"
ARRAYS = "tests/unit/capture/effects/test_written_arrays.py"

SETTINGS = "tests/behaviour/hidden_state/test_settings.py"

CAPTURE_MUTATIONS = (
    Mutation(
        name="switches_of_torch_compute",
        what="a function of torch that sets a switch which nobody compares counts as one that computes",
        file="capture/effects/c_functions.py",
        old="if owner is not torch._C or function in compared() else Kind.MORE",
        new="if True else Kind.MORE",
        tests=(SETTINGS,),
    ),
    Mutation(
        name="locks_stay_taken",
        what="a trace that ends in the midst of somebody's code leaves the locks taken that this code has taken",
        file="capture/tracing/call_watch.py",
        old="            watch.locks.give_back()\n",
        new="",
        tests=("tests/unit/capture/tracing/test_call_watch.py",),
    ),
    Mutation(
        name="methods_have_no_state",
        what="methods of C objects that nobody looks into may be called in a graph",
        file="capture/effects/library_state.py",
        old="        return gc.is_tracked(thing) and any(one is thing for one in gc.get_objects(0))",
        new="        return True",
        tests=("tests/unit/capture/effects/test_library_state.py",),
    ),
    Mutation(
        name="libraries_have_no_state",
        what="what code of a library reads and writes of its own is not watched",
        file="capture/effects/library_state.py",
        old="        self._entered.add((code, id(first)))",
        new="        return",
        tests=("tests/unit/capture/effects/test_library_state.py",),
    ),
    Mutation(
        name="late_state_not_compared",
        what="state of a library to which a trace has come is not compared by later calls",
        file="capture/reach/step_context.py",
        old="        return [*only_reached(found, walked), *self.reachable.late]",
        new="        return [*only_reached(found, walked)]",
        tests=(SETTINGS,),
    ),
    Mutation(
        name="functions_of_libraries_for_ever",
        what="a function of a library that is exchanged between calls is still the one that was traced",
        file="capture/reach/reachability.py",
        old="            if named := sorted(self._names & {*held}):",
        new="            if named := sorted(k for k in self._names & {*held} if isinstance(held[k], SCALARS)):",
        tests=("tests/unit/capture/effects/test_library_state.py",),
    ),
    Mutation(
        name="symbols_round_to_themselves",
        what="a size that moves is not rounded to tens",
        file="capture/scalars/symbol_views.py",
        old="    return symbol if ndigits is None or ndigits >= 0 else round(int(symbol), ndigits)",
        new="    return symbol",
        tests=("tests/behaviour/numbers/test_uses.py",),
    ),
    Mutation(
        name="symbols_are_no_numbers",
        what="a size or a rate that moves is no int or float to the step's code",
        file="capture/tracing/patches.py",
        old="    yield symbols_are_numbers()\n",
        new="",
        tests=("tests/unit/capture/scalars/test_symbol_views.py",),
    ),
    Mutation(
        name="types_of_symbols",
        what="code that asks type(size) is int is given the class of the symbol",
        file="capture/scalars/symbol_views.py",
        old='{"type": NumberOrType,',
        new='{"type": type,',
        tests=("tests/unit/capture/scalars/test_symbol_views.py",),
    ),
    Mutation(
        name="symbols_are_numbers_to_torch",
        what="a symbol is an int to torch, too",
        file="capture/scalars/symbol_views.py",
        old="            return owner not in (Owner.TORCH, Owner.OURS) and not file.startswith(_sympy.__path__[0])",
        new="            return True",
        tests=("tests/unit/capture/scalars/test_symbol_views.py",),
    ),
    Mutation(
        name="writes_past_classes_unseen",
        what="what a step sets by object.__setattr__ is not compared in later calls",
        file="capture/python/code_names.py",
        old='_PAST_CLASSES = ("__setattr__", "__delattr__")',
        new="_PAST_CLASSES = ()",
        tests=(f"{SETTLED}[a name past the class-True]",),
    ),
    Mutation(
        name="closures_see_state_that_is_not_there",
        what="the closure of an optimizer sees the state that a capture has made",
        file="capture/reach/train_state.py",
        old="            if id(opt) in waiting:",
        new="            if False:",
        tests=(
            STATE,
            "tests/unit/capture/reach/test_train_state.py::"
            "test_a_step_that_looks_at_state_before_there_is_any[True-False]",
        ),
    ),
    Mutation(
        name="state_without_gradients",
        what="a step sees state of parameters that had no gradient",
        file="capture/reach/train_state.py",
        old="owner is opt and param.grad is None]",
        new="owner is opt and False]",
        tests=(STATE,),
    ),
    Mutation(
        name="seeds_compared_by_state",
        what="a step that seeds torch's generator as it was seeded before becomes a graph",
        file="capture/reach/rng_and_iterators.py",
        old="            self._thing.manual_seed(secrets.randbits(60))",
        new="            pass",
        tests=(GENERATORS,),
    ),
    Mutation(
        name="draws_of_numpy_compared_by_state",
        what="a step that draws from a generator of numpy and puts it back becomes a graph",
        file="capture/reach/rng_and_iterators.py",
        old="        return super().restore() or self._lock.taken",
        new="        return super().restore()",
        tests=(GENERATORS,),
    ),
    Mutation(
        name="draws_of_python_compared_by_state",
        what="a step that draws from a generator of Python and puts it back becomes a graph",
        file="capture/tracing/call_watch.py",
        old="        if is_generator and id(owner) not in self._generators:",
        new="        if is_generator:",
        tests=(GENERATORS,),
    ),
    Mutation(
        name="seeds_are_frozen",
        what="a step that asks a generator of torch for its seed becomes a graph",
        file="capture/tracing/call_watch.py",
        old="isinstance(owner, (random.Random, torch.Generator))",
        new="isinstance(owner, random.Random)",
        tests=(GENERATORS,),
    ),
    Mutation(
        name="gradients_of_arguments_not_there",
        what="a graph takes an argument that has a gradient for one without",
        file="capture/tracing/patches.py",
        old="        if self.had_grads.get(id(tensor)):",
        new="        if False:",
        tests=(GRADIENTS,),
    ),
    Mutation(
        name="gradients_of_arguments_not_compared",
        what="a graph that was captured with an argument without gradient runs for one with a gradient",
        file="capture/guards/argument_guards.py",
        old="            if isinstance(now, torch.Tensor) and is_leaf(now) and now.grad is not None:",
        new="            if False:",
        tests=(GRADIENTS,),
    ),
    Mutation(
        name="attributes_asked_behind_the_back",
        what="a piece reads gradients in a way that its capture does not see",
        file="live/pieces/piece.py",
        old='    if isinstance(descriptor, types.GetSetDescriptorType) and function.__name__ == "__get__":',
        new="    if False:",
        tests=(GRADIENTS,),
    ),
    Mutation(
        name="arrays_written_behind_reads",
        what="a graph reads an array that the step has written to since",
        file="capture/capture.py",
        old="            if trace.foreign and side_effects.has_written_buffers:",
        new="            if False:",
        tests=(f"{ARRAYS}::test_a_tensor_has_what_was_there_when_it_was_read",),
    ),
    Mutation(
        name="tensors_stay_sequences",
        what="behind a capture with ranks torch.tensor asks tensors of no dimensions for their length",
        file="capture/scalars/tensor_indexing.py",
        old="        for kind in _kinds(torch.Tensor) - sequences:",
        new="        for kind in ():",
        tests=(
            "tests/unit/capture/scalars/test_tensor_indexing.py::test_a_tensor_is_no_sequence_meanwhile_and_afterwards",
            "tests/unit/capture/tracing/process_groups/test_process_groups.py::"
            "test_tensors_are_no_sequences_behind_a_capture_with_ranks",
        ),
    ),
    Mutation(
        name="views_of_state_are_copies",
        what="a result that is a view of a parameter does not show what later calls write",
        file="capture/reach/traced_inputs.py",
        old="            if (view := next(filter(None, views), None)) is not None:",
        new="            if (view := None) is not None:",
        tests=("tests/unit/capture/reach/test_state_views.py::test_a_view_of_state_shows_what_is_written_later",),
    ),
    Mutation(
        name="tensors_on_arrays_are_copies",
        what="a graph returns a copy of an array where eager code returns a tensor on its memory",
        file="capture/functionalize/alias_checks.py",
        old="        if isinstance(held, torch.Tensor) and not held.untyped_storage().resizable():",
        new="        if False:",
        tests=(
            "tests/unit/capture/reach/test_state_views.py::test_a_tensor_on_an_array_shows_what_is_written_to_the_array",
        ),
    ),
    Mutation(
        name="state_of_a_closure_without_gradients",
        what="gradients that a closure clears count as those that its optimizer steps with",
        file="capture/python/node_origin.py",
        old="        itself, *given = args\n",
        new="        self.on_optimizer_step(opt)\n        itself, *given = args\n",
        tests=(
            "tests/unit/capture/reach/test_train_state.py::"
            "test_a_closure_that_clears_gradients_from_before_and_makes_none_leaves_no_state",
        ),
    ),
    Mutation(
        name="objects_answer_for_attributes",
        what="the user's own class answers where an attribute of its object is looked for",
        file="capture/python/container_views.py",
        old="        return way(thing, name)\n",
        new="        return getattr(thing, name)\n",
        tests=(
            "tests/unit/capture/python/test_attribute_access.py::"
            "test_an_object_that_answers_for_every_name_is_asked_for_none",
        ),
    ),
    Mutation(
        name="writes_that_change_nothing_not_noted",
        what="what a step sets to the value that is there already is not compared in later calls",
        file="capture/python/attribute_access.py",
        old="        self._note(thing, name)  # a write",
        new="        # a write",
        tests=(f"{SETTLED}[an object-True]",),
    ),
    Mutation(
        name="set_up_and_left",
        what="a capture that is not used leaves what its first run set, and the next one sees no write",
        file="capture/capture.py",
        old="            discard()\n            setup.effects.restore()\n",
        new="            discard()\n",
        tests=(f"{SETTLED}[a dict-True]",),
    ),
    Mutation(
        name="set_switches_kept",
        what="a step that sets a switch of torch is kept for calls in front of which it is another one",
        file="api/cache/warm_start.py",
        old="            _refuse_moved_modes(header.fingerprint)\n",
        new="",
        tests=(f"{SETTLED}[a switch of torch-True]",),
    ),
    Mutation(
        name="conditions_make_constants",
        what="a size for which a condition holds alone is a constant of all later traces",
        file="capture/sizes/size_symbols.py",
        old="        if self._is_condition:\n            return None\n",
        new="",
        tests=(
            "tests/behaviour/moving_sizes/test_sizes.py::"
            "test_a_condition_that_holds_for_one_size_leaves_the_others_one_trace",
        ),
    ),
    Mutation(
        name="errors_make_constants",
        what="an error that the step raises for one batch makes its sizes constants of all later traces",
        file="capture/retrace_policy.py",
        old="            self._varying, self._constant = varying, constant\n",
        new="",
        tests=("tests/behaviour/moving_sizes/test_sizes.py::test_an_error_of_the_step_makes_no_size_a_constant",),
    ),
    Mutation(
        name="saved_conditions_forgotten",
        what="a trace of another process runs for sizes that its conditions exclude",
        file="capture/sizes/size_symbols.py",
        old="            self.evaluate_expr(condition)\n",
        new="            pass\n",
        tests=(f"{WARM_SIZES}::test_a_saved_trace_is_for_the_sizes_of_its_conditions_alone",),
    ),
    Mutation(
        name="files_share_a_context",
        what="a saved trace is bound with the numbers that another file has left, and reads an old one",
        file="api/cache/warm_start.py",
        old="with again() if number else nullcontext(context) as fresh:",
        new="with nullcontext(context) as fresh:",
        tests=(f"{WARM_SIZES}::test_a_file_that_does_not_fit_leaves_nothing_to_the_next_one",),
    ),
    Mutation(
        name="saved_constants_not_compared",
        what="a trace of another process runs for another size than the one that had become a constant",
        file="api/cache/warm_start.py",
        old="        if (layouts := _constant_layouts(captured)) != body.constant:",
        new="        if (layouts := body.constant) != body.constant:",
        tests=(f"{WARM_SIZES}::test_a_size_that_has_become_a_constant_is_not_loaded_for_another_one",),
    ),
    Mutation(
        name="lengths_are_numbers",
        what="the length of a tensor is a constant",
        file="capture/scalars/symbol_views.py",
        old=', "len": _length}',
        new="}",
        tests=("tests/unit/capture/scalars/test_symbol_views.py::test_the_length_of_a_tensor_is_a_size_that_moves",),
    ),
    Mutation(
        name="transforms_of_any_order",
        what="a Fourier transform has the strides of the traced call for an argument with another order in memory",
        file="capture/sizes/python_forms.py",
        old="            _keep_order(args[0])\n",
        new="",
        tests=(
            "tests/behaviour/moving_sizes/test_composed_operators.py::"
            "test_a_transform_is_for_one_order_of_dims_in_memory",
        ),
    ),
    Mutation(
        name="reducer_never_done",
        what="DistributedDataParallel reduces a second backward behind one forward",
        file="capture/wrappers/ddp.py",
        old="            _account.awaited -= _account.came",
        new="            pass",
        tests=(f"{REDUCED}[a_second_backward]",),
    ),
    Mutation(
        name="returned_gradients_reduced",
        what="gradients that torch.autograd.grad returns are reduced in a wrapper",
        file="capture/tracing/patches.py",
        old="None if ddp.is_managed(one) else names.get(id(one))",
        new="names.get(id(one))",
        tests=(f"{REDUCED}[gradients_that_are_returned]",),
    ),
    Mutation(
        name="reducer_takes_new_parameters",
        what="a wrapper reduces what did not train when it was made",
        file="capture/wrappers/ddp.py",
        old="    return [param for bucket in buckets for param in bucket.parameters()]",
        new="    return [one for one in wrapper.module.parameters() if one.requires_grad and buckets]",
        tests=(f"{REDUCED}[unfrozen_later]",),
    ),
    Mutation(
        name="forwards_not_noted",
        what="a wrapper forgets that no reduction followed its last forward",
        file="capture/bind/bind.py",
        old="            if ddp.changes_note(wrappers[number], is_awaited):",
        new="            if False:",
        tests=(f"{REDUCED}[micro_batches_by_call]",),
    ),
    Mutation(
        name="ignored_buffers_broadcast",
        what="buffers that a wrapper ignores are broadcast",
        file="runtime/wrapped_strategy.py",
        old="            buffers.append(name)",
        new="            pass",
        tests=(f"{REDUCED}[an_ignored_buffer]",),
    ),
)
