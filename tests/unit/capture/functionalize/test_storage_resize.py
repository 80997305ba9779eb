"""Storage effects: what guards them, the operators, and the rule about inputs without memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit import builders
from wholestep.capture.functionalize.storage_resize import StorageSizes, is_freed, num_bytes, place_of
from wholestep.errors import InternalError
from wholestep.ir import op_info
from wholestep.ir.verifier import verify


def test_the_sentence_says_which_storage_has_another_size():
    buffer, argument = torch.ones(3), torch.ones(2)
    sizes = StorageSizes(state=[("cache", buffer, 12)], arguments=[(1, 8)])
    assert sizes.why_not([0, argument]) is None
    buffer.untyped_storage().resize_(0)
    assert sizes.why_not([0, argument]) == "the storage of cache had 12 bytes, has 0"
    buffer.untyped_storage().resize_(12)
    argument.untyped_storage().resize_(0)
    assert sizes.why_not([0, argument]) == "the storage of argument 1 had 8 bytes, has 0"


def test_only_what_has_elements_and_no_memory_is_freed():
    x = torch.ones(3)
    assert not is_freed(x)
    assert not is_freed(torch.empty(0))
    x.untyped_storage().resize_(0)
    assert is_freed(x)
    assert num_bytes(torch.eye(2).to_sparse()) == -1


def test_the_place_of_a_tensor_is_its_storage_and_its_shape():
    x = torch.ones(4)
    assert place_of(x) == place_of(x.detach())
    assert place_of(x) != place_of(x.view(2, 2))
    assert place_of(x) != place_of(x.clone())


def test_resizing_in_place_frees_and_allocates():
    x = torch.ones(3)
    assert op_info.RESIZE_STORAGE_(x, 0) is x
    assert x.untyped_storage().size() == 0
    op_info.RESIZE_STORAGE_(x, 12)
    assert x.untyped_storage().size() == 12


def test_resizing_out_of_place_leaves_the_argument_alone():
    x = torch.ones(2, 3).t()
    freed = op_info.RESIZE_STORAGE(x, 0)
    assert (freed.shape, freed.stride(), freed.untyped_storage().size()) == (x.shape, x.stride(), 0)
    assert op_info.RESIZE_STORAGE(freed, 24).untyped_storage().size() == 24
    assert torch.equal(x, torch.ones(3, 2))
    assert op_info.in_place_variant(op_info.RESIZE_STORAGE) is op_info.RESIZE_STORAGE_


def test_a_version_counter_is_read_and_set():
    x = torch.ones(2).add_(1).add_(1)
    assert op_info.VERSION(x) == 2
    op_info.SET_VERSION(x, 7)
    assert x._version == 7


@pytest.mark.parametrize(("read", "fine"), [(torch.sin, False), (torch.zeros_like, True), (torch.t, True)])
def test_a_program_does_not_read_an_input_without_memory(read, fine):
    program = builders.capture(read, [torch.ones(2, 3)])
    program = replace(program, inputs=tuple(replace(record, freed=True) for record in program.inputs))
    if fine:
        verify(program)
    else:
        with pytest.raises(InternalError, match="reads x0, which has no memory"):
            verify(program)
