"""Faults of sharded strategies: placement, gathers, their prefetch, and live objects in parts."""

from __future__ import annotations

from mutations import Mutation

PLACED = "tests/unit/place/test_sharded.py"
VERIFY = "tests/unit/runtime/verify/test_verify_sharded.py"
BUCKETS = "tests/unit/passes/comm/test_gather_buckets.py"
PREFETCH = "tests/unit/passes/schedule/test_prefetch.py"
IN_PLACE = "tests/unit/passes/memory/test_gather_in_place.py"
STATE = "tests/ranks/sharding/test_live_state.py"
SHARD = "tests/ranks/sharding/test_shard.py"
LIVE = "tests/ranks/sharding/test_live_shards.py::test_python_sees_whole_tensors"
POOL = "tests/unit/lower/cudagraph/test_graph_pool.py"

SHARDING_MUTATIONS = (
    Mutation(
        name="all_ranks_own_the_first_part",
        what="every rank updates the rows of rank 0",
        file="place/layouts.py",
        old="spec), spec.dim, rank, like=whole)",
        new="spec), spec.dim, 0, like=whole)",
        tests=(f"{VERIFY}::test_ranks_with_parts_take_the_eager_step[zero1-2-8]",),
    ),
    Mutation(
        name="parts_of_columns_stay_apart",
        what="parts that are cut along a later dim are taken as they come, one behind another",
        file="place/layouts.py",
        old="    if spec.dim:  # parts lie one behind another along the first dim",
        new="    if False:",
        tests=(f"{VERIFY}::test_a_dim_that_is_not_the_first",),
    ),
    Mutation(
        name="norms_of_one_rank",
        what="the norm of a part counts as that of the whole gradient",
        file="place/sharded_placer.py",
        old='        operation = "max" if is_max else "sum"',
        new='        operation = "max"',
        tests=(f"{VERIFY}::test_optimizers_and_accumulation[fsdp_keep-train-sgd]",),
    ),
    Mutation(
        name="gathered_once",
        what="parameters that are to be gathered again are kept",
        file="place/sharded_placer.py",
        old="        if not self._regather and (",
        new="        if (",
        tests=(f"{PLACED}::test_parameters_that_the_backward_reads_are_gathered_again",),
    ),
    Mutation(
        name="reduced_gradients_reduced_again",
        what="a gradient from before the call, which is a sum over the ranks already, is summed again",
        file="place/sharded_rules.py",
        old="    is_gradient = isinstance(spec, ShardSpec) and",
        new="    is_gradient = False and",
        tests=(f"{PLACED}::test_gradients_from_before_a_call_are_added_behind_the_reduction",),
    ),
    Mutation(
        name="replicas_not_summed",
        what="gradients are reduced over one axis of two",
        file="place/strategies.py",
        old="        for axis in self.axes[1:]:",
        new="        for axis in ():",
        tests=(f"{PLACED}::test_over_replicas_parts_of_gradients_are_summed",),
    ),
    Mutation(
        name="reduce_dtype_ignored",
        what="gradients travel in their own type, whatever the policy says",
        file="place/strategies.py",
        old="        return policy.reduce_dtype or policy.param_dtype or dtype",
        new="        return dtype",
        tests=(f"{STATE}::test_types_of_a_policy_are_those_of_fully_shard",),
    ),
    Mutation(
        name="phases_share_gathers",
        what="gathers of the backward are those of the forward",
        file="passes/comm/gather_buckets.py",
        old="            found.setdefault(record.phase or Region.FORWARD.value, []).append(node)",
        new="            found.setdefault(Region.FORWARD.value, []).append(node)",
        tests=(f"{BUCKETS}::test_every_parameter_is_gathered_once_a_phase_in_the_order_of_its_use",),
    ),
    Mutation(
        name="gathers_behind_reductions",
        what="a gather waits for the reductions that stand before it",
        file="passes/comm/gather_buckets.py",
        old="    _before_reductions(program.graph)\n    return",
        new="    return",
        tests=(f"{BUCKETS}::test_a_gather_stands_before_the_reductions_since_the_last_one",),
    ),
    Mutation(
        name="prefetch_without_bound",
        what="gathers start early whether or not there is room for what they bring",
        file="passes/schedule/prefetch.py",
        old=" and live_bytes[place - 1] + num_bytes <= bound_bytes:",
        new=":",
        tests=(f"{PREFETCH}::test_no_gather_moves_past_a_point_without_room",),
    ),
    Mutation(
        name="prefetch_forgets_what_it_moved",
        what="each gather finds the room that those before it have taken",
        file="passes/schedule/prefetch.py",
        old="            live_bytes[number] += _made_bytes(problem, group)",
        new="            pass",
        tests=(f"{PREFETCH}::test_what_has_moved_takes_room_from_gathers_behind_it",),
    ),
    Mutation(
        name="gathers_not_kept_back",
        what="a scheduler may start a gather before the place that was found for it",
        file="passes/schedule/prefetch.py",
        old="            deps.update(before)",
        new="            pass",
        tests=(PREFETCH,),
    ),
    Mutation(
        name="gathers_into_new_memory",
        what="updated parameters are gathered beside the old ones and copied",
        file="passes/memory/gather_in_place.py",
        old="    if not any(chosen):",
        new="    if True:",
        tests=(f"{IN_PLACE}::test_nothing_is_copied",),
    ),
    Mutation(
        name="rank_of_the_wrong_axis",
        what="a rank takes its part by its number among the replicas",
        file="runtime/sharding/shard_values.py",
        old="mesh.get_local_rank(mesh.ndim - 1)",
        new="mesh.get_local_rank(0)",
        tests=("tests/ranks/sharding/test_trainings.py::test_optimizer_state_is_cut_over_the_last_axis_of_two",),
    ),
    Mutation(
        name="old_state_left_whole",
        what="what an optimizer kept of a parameter before it was sharded stays whole",
        file="runtime/sharding/replace_references.py",
        old="            if isinstance(new, DTensor) and isinstance(held, dict):",
        new="            if False:",
        tests=(f"{STATE}::test_whoever_holds_a_parameter_holds_the_sharded_one",),
    ),
    Mutation(
        name="gradients_stay_plain",
        what="parts of gradients are left as plain tensors",
        file="runtime/sharding/shard_values.py",
        old="    for number, spec in outputs:",
        new="    for number, spec in ():",
        tests=("tests/ranks/sharding/test_behaviour.py::test_equals_eager_ddp[gradients_never_zeroed-fsdp_keep]",),
    ),
    Mutation(
        name="initialised_by_the_seed_of_a_rank",
        what="each rank makes a model of the meta device with its own random numbers",
        file="runtime/sharding/materialize.py",
        old="        torch.manual_seed((seed + zlib.crc32(name.encode())) % 2**63)\n",
        new="",
        tests=(f"{SHARD}::test_numbers_are_the_same_for_every_world_size_and_strategy",),
    ),
    Mutation(
        name="graphs_without_room",
        what="an allocator takes the memory of graphs tensor by tensor",
        file="lower/cudagraph/graph_pool.py",
        old="        if num_bytes:",
        new="        if False:",
        tests=(f"{POOL}::test_a_pool_begins_with_room_for_its_members_in_one_piece",),
    ),
    Mutation(
        name="workspaces_stay",
        what="a library keeps memory of graphs that have gone",
        file="lower/cudagraph/graph_pool.py",
        old='                torch._C._cuda_clearCublasWorkspaces()  # see "nothing may stay in it"',
        new="                pass",
        tests=(f"{POOL}::test_no_workspace_stays_in_a_pool",),
    ),
    Mutation(
        name="gathers_cut_elsewhere",
        what="ZeRO gathers updated parameters in other buckets than their gradients came in, and twice as many",
        file="passes/comm/gather_buckets.py",
        old="sorted(starts, key=lambda node: (at_us[node], last[node]))",
        new="sorted(starts, key=at_us.__getitem__)",
        tests=(
            "tests/ranks/sharding/test_trainings.py::"
            "test_updated_parameters_are_gathered_in_the_buckets_of_their_gradients",
        ),
    ),
    Mutation(
        name="python_sees_shards",
        what="Python of a live step computes with DTensors, whose numbers are those of one rank",
        file="live/live_step.py",
        old="with whole_operands(peers) if peers is not None and peers.computes_whole else nullcontext():",
        new="with nullcontext():",
        tests=(f"{LIVE}[reads_parameters_and_gradients]",),
    ),
    Mutation(
        name="gradients_of_whole_tensors_lost",
        what="a parameter that is used outside of its module gets no gradient there",
        file="live/peers.py",
        old="            self.shards.reduce(told[len(fresh) :], self._reduce)\n",
        new="",
        tests=(f"{LIVE}[penalty_on_weights]",),
    ),
    Mutation(
        name="views_of_shards_not_written_back",
        what="what Python writes to a view of a whole tensor never reaches the shard",
        file="live/shard_calls.py",
        old="            written = [one for one in wholes.values() if one.write_back()]\n",
        new="            written = []\n",
        tests=(f"{LIVE}[changes_gradients]",),
    ),
    Mutation(
        name="live_gradients_reduced_over_one_axis",
        what="on a mesh of two axes a live step reduces gradients of whole parameters over one of them",
        file="live/peers.py",
        old="            all_reduced(flat, dist.ReduceOp.SUM, self._axes)",
        new="            all_reduced(flat, dist.ReduceOp.SUM, self._axes[:1])",
        tests=("tests/ranks/sharding/test_live_steps.py::test_a_step_on_a_mesh_of_two_axes_is_not_refused[zero1-0]",),
    ),
    Mutation(
        name="ranks_reduce_what_they_used",
        what="the hooks of fully_shard reduce gradients of other parameters on each rank",
        file="capture/wrappers/fully_shard_hooks.py",
        old="                gathered.grad = torch.zeros_like(gathered)\n",
        new="                pass\n",
        tests=(f"{LIVE}[ranks_use_different_parameters]",),
    ),
    Mutation(
        name="views_undo_later_writes",
        what="a view of a sharded weight puts back what was there before a write by another way",
        file="live/shard_calls.py",
        old="        if written:  # views",
        new="        if False:  # views",
        tests=(f"{LIVE}[changes_parameters]",),
    ),
)
