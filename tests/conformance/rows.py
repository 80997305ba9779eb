"""The rows of the conformance suite: every behaviour that is promised, once, in the order of the table.

A test says which row it stands for with ``@pytest.mark.row("S8", "store_timeout")``; a row may have many tests.
`tests/conformance/table.py` prints what became of each row.
"""

from __future__ import annotations

from dataclasses import dataclass

TITLES = {
    "S1": "A training step compiled as a whole (wholestep.spmd)",
    "S2": "Collectives over the axes of a mesh",
    "S3": "CommTensor: collectives that a trace can see",
    "S6": "Collectives inside a compiled step",
    "S7": "Patterns of hand-written distributed code",
    "S8": "Stores",
    "S9": "Process groups and what their collectives check",
    "S10": "Backends, reduce operations, launch environment",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One promised behaviour."""

    group: str
    """A key of `TITLES`."""
    name: str
    """Unique within its group."""
    meaning: str
    """What is promised, in a few words."""
    no_gpu: str = ""
    """Why no test of the row runs on GPUs, if none does."""


def _rows(group: str, no_gpu: str = "", /, **meanings: str) -> list[Row]:
    return [Row(group=group, name=name, meaning=meaning, no_gpu=no_gpu) for name, meaning in meanings.items()]


ROWS: tuple[Row, ...] = (
    *_rows(
        "S1",
        train_step_simple="a step of forward and backward that returns gradients: DDP's, times the world size",
        sgd="SGD (foreach, with and without bias) equals DDP; a layer without bias has one all-reduce",
        adam_foreach="foreach Adam equals DDP after an eager and a compiled step",
        adam_fused="fused Adam equals DDP after an eager and a compiled step",
        module_override="an Override swaps modules and rewrites the placed graph",
        module_multi_fqn_override="an Override for several module names at once",
        gm_cache_and_transformation="the graph transformation runs once; the cached graph is the one that runs",
        buffer="buffers, one that takes a gradient in forward, and an optimizer written by the user",
        expand_dimension="expand keeps the sizes of one rank",
        log_softmax="log_softmax in a train step equals DDP",
        nll_loss="NLL loss in a train step equals DDP",
        replicated_embedding="embedding, layer norm without affine parts, softmax, NLL loss",
        pos_embedding="two embeddings with arange positions, cross entropy",
        factory_full="torch.full inside of the step",
        factory_arange="torch.arange inside of the step, both forms",
        sym_numel="weight.numel() used in arithmetic",
        sym_stride="weight.stride(0) used in arithmetic",
        scalar="scalar_tensor inside of the step",
        stack="stack inside of the step",
        arithmetic_ops_on_symint="integer arithmetic on shapes",
        slice="slicing inside of the step",
        bulk_cat="cat of a hundred results",
    ),
    *_rows(
        "S2",
        tracing_all_reduce_nd="all_reduce over every axis of 2x2 and 2x2x2, traced once, run with other inputs",
        broadcast_nd="broadcast over every axis",
        scatter_nd="scatter over every axis, in place",
        all_gather_nd="all_gather over every axis",
    ),
    *_rows(
        "S3",
        allreduce_work_wait="all_reduce: the reader of its result reads a wait, and the wait the collective",
        allgather_work_wait="all_gather into a list",
        allgather_into_tensor_work_wait="all_gather_into_tensor",
        reduce_scatter_work_wait="reduce_scatter from a list",
        reduce_scatter_tensor_work_wait="reduce_scatter_tensor",
        broadcast_work_wait="broadcast",
        scatter_work_wait="scatter",
        alltoall_work_wait="all_to_all between lists",
        nested_comm_tensor_wrapping="a CommTensor around a CommTensor",
        consecutive_comm_work_wait="two all_reduces after each other",
    ),
    *_rows(
        "S6",
        allreduce_inductor="matmul, cat, all_reduce, add equals eager",
        allreduce_inductor_cudagraph_trees="all_reduce replayed for 3 sizes, 3 times each",
        c10d_functional_tagged_pt2_compliant="functional collectives are safe to trace",
        eager_allreduce_inductor_wait="started eagerly, awaited in compiled code",
        inductor_allreduce_eager_wait="started in compiled code, awaited eagerly",
        allreduce_input_buffer_reuse="the input of an all_reduce stays right when it is read again",
        permute_tensor="permute_tensor by pairs of source and destination",
        allgather_output_buffer_reuse="the output of an all_gather is used again",
        allgather_contiguous_input="all_gather of a tensor that is not contiguous",
        allgather_into_tensor_inductor="all_gather_into_tensor equals eager",
        reduce_scatter_tensor_inductor="reduce_scatter_tensor equals eager",
        all_to_all_single_inductor="all_to_all_single with split sizes that are data",
        all_to_all_single_inductor_split_sizes_none="all_to_all_single without split sizes",
        inductor_single_op="one collective adds no copy of its output",
        inductor_steal_buffer="an intermediate that nobody reads again is reduced in place",
        inductor_doesnt_mutate_shared="an intermediate that is read again is not reduced in place",
        dynamo_trace_allreduce="functional all_reduce becomes an operator and a wait",
        dynamo_trace_all_gather_tensor="functional all_gather_tensor becomes an operator and a wait",
        dynamo_trace_all_gather_tensor_pg="the same, with a process group object as the group",
        dynamo_rewrite_dist_all_gather="dist.all_gather_into_tensor becomes functional",
        dynamo_rewrite_dist_all_gather_list="dist.all_gather with a list becomes functional",
        dynamo_rewrite_dist_all_gather_args_match="arguments by keyword, in any order",
        dynamo_rewrite_dist_reduce_scatter="dist.reduce_scatter_tensor becomes functional",
        dynamo_rewrite_dist_allreduce="dist.all_reduce: group positional, None, by keyword, absent",
        dynamo_rewrite_dist_all_to_all_single="dist.all_to_all_single becomes functional",
        dynamo_rewrite_dist_allreduce_reduce_op="SUM, AVG, PRODUCT, MIN, MAX",
        dynamo_get_world_group="the world group by each of its three names",
        dynamo_support_collective_op_with_async_op_False="async_op=False spelled out",
        dynamo_graphbreaks_unsupported_async_op="async_op=True and wait() stay in the one graph",
        dynamo_pg_var="the rank and size of a group are usable inside of the step",
        dynamo_trace_reduce_scatter_tensor="functional reduce_scatter_tensor becomes an operator and a wait",
        dynamo_trace_allgather_coalesced="all_gather of two tensors at once, each awaited on its own",
        backwards="backward through a collective that has none is a clear error",
        meta="collectives of meta tensors give shapes",
        inductor_all_gather_coalesced="coalesced all_gather of two tensors stays coalesced",
        inductor_reduce_scatter_coalesced="coalesced reduce_scatter of two tensors stays coalesced",
        fuzz="200 random steps with 1 to 6 collectives each equal eager, bitwise",
    ),
    *_rows(
        "S7",
        intermediate_hook_with_closure="a tensor hook that closes over an intermediate and an object",
        storage_resize_zero="a storage resized to zero inside of the step",
        storage_resize_nonzero="a storage resized to its size again inside of the step",
        unsafe_set_version_counter1="a copy whose version counter is set back, on an intermediate",
        unsafe_set_version_counter2="a copy whose version counter is set back, then backward",
        unsafe_preserve_version_counter1="a copy under a preserved version counter",
        unsafe_preserve_version_counter2="a copy under a preserved version counter, then backward",
        module_backward_hooks="full backward pre-hooks and hooks on one module, calls counted",
        module_backward_hooks_multi_layers="the same on two layers, over four steps",
        nn_param_return1="a new Parameter made of an input is returned",
        nn_param_return2="a new Parameter of an input that takes no gradient is returned",
        nn_param_return3="a new Parameter of an input plus a number is returned",
        nn_param_return4="the same, taking no gradient",
        fake_distributed="FSDP written by hand: hooks resize and refill a weight, four steps equal eager",
    ),
    *_rows(
        "S8",
        "stores and meetings touch no device",
        store_timeout="a read of a missing key gives up within its time (file, tcp, hash)",
        store_based_barrier="a store barrier raises on every rank that waits for one that never comes",
        barrier_names_the_missing="World.barrier says who is missing, for how long, and where each other rank waits",
        heartbeat_ends_a_rendezvous="ranks in a collective and in a meeting of others find each other out in seconds",
    ),
    *_rows(
        "S9",
        sequence_num_set_default_pg="all ranks start with the same sequence number, in the default group",
        sequence_num_set_new_group="all ranks start with the same sequence number, in a new group",
        sequence_num_incremented_default_group="one more per collective; the numbers show who lags",
        sequence_num_incremented_subgroup="one more per collective in a sub-group",
        warn_not_in_group="a collective on a group that this rank is not in warns",
        rank_membership="group rank and global rank both ways, and the errors of ranks and groups unknown",
        new_group_local_sync="groups that only their members make",
        new_group_local_sync_sanity_check="such groups carry collectives",
        new_group_local_sync_duplicate_pg="two such groups with the same members",
        tensor_dtype_mismatch="mixed dtypes raise, for 14 calls",
        tensor_dtype_complex="complex tensors go with real ones of the same size",
        bool_tensors="broadcast of bool",
        collectives="every collective with varying tensors",
        allreduce_coalesced="all_reduce of several tensors at once",
        all_to_all_single="all_to_all_single",
    ),
    *_rows(
        "S10",
        "decided on the host, or carried by a group for CPU tensors",
        get_backend_name="a process group written in Python has a name",
        backend_class_attr="a registered backend is an attribute of dist.Backend",
        is_backend_available="a registered backend is available",
        backend_config="backend strings, good ones and bad ones",
        init_process_group_with_multiple_backends="one Python backend for every device",
        python_collectives="collectives through a process group written in Python",
        send_recv="send and recv through a process group written in Python",
        init_process_group_optional_backend="a default backend for each device",
        init_process_group_for_all_backends="every available backend makes a group that knows its rank, size and name",
        op_isinstance_of_reduceop="reduce operations are of class ReduceOp",
        reduceop_copyable="reduce operations can be copied",
        reduceop_pickle="reduce operations can be pickled",
        reduceop_equal="reduce operations compare",
        debug_level="the debug level from the environment, in any case; bad values raise",
        local_rank_without_env="LOCAL_RANK missing raises",
        local_rank_without_env_with_fallback="LOCAL_RANK missing, with a fallback",
        local_rank_overrides_fallback="LOCAL_RANK counts more than a fallback",
        local_rank="LOCAL_RANK read",
        world_device="World takes its GPU from LOCAL_RANK; one that does not fit is a clear error",
        python_backend_carries_a_compiled_step="a compiled DDP step through a Python process group equals eager DDP",
    ),
)
