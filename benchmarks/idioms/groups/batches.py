"""Where batches come from: loaders inside of the step, objects that hold them, arrays of numpy, text and flags."""

from __future__ import annotations

import queue
import threading

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.idioms.base import CLASSES, FEATURES, Loop, batch, features, idiom, loop, small_training, update


class Mapping:
    """Hands tensors out of a dictionary, as torch_geometric's Data and BatchEncoding do."""

    def __init__(self, **entries):
        self.__dict__["_mapping"] = dict(entries)

    def __getattr__(self, name):
        try:
            return self._mapping[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        self._mapping[name] = value


@idiom(ranks=True, inductor=True)
def batch_behind_getattr() -> Loop:
    """One object for all batches, whose tensors are exchanged between calls."""
    model, opt = small_training()
    data = Mapping(x=None, y=None, count=0)

    def step():
        data.count += 1
        return update(F.cross_entropy(model(data.x), data.y), opt)

    def arguments(call):
        data.x, data.y = batch(call)
        return ()

    return loop(step, arguments, model=model, opt=opt, data=lambda: data._mapping)


class Encoding(dict):
    """A dictionary whose keys are attributes, and that moves itself to a device."""

    def __getattr__(self, name):
        return self[name]

    def to(self, device):
        return Encoding({key: value.to(device) for key, value in self.items()})


@idiom()
def dictionary_with_attributes() -> Loop:
    """A batch as Hugging Face's tokenizers give it, unpacked by `**`."""
    model, opt = small_training()

    def forward(inputs, labels, weight=1.0):
        return Encoding(loss=weight * F.cross_entropy(model(inputs), labels))

    def step(encoding):
        encoding = encoding.to("cpu")
        encoding["weight"] = 0.5 + len(encoding) / 4
        return update(forward(**encoding).loss, opt)

    def arguments(call):
        x, y = batch(call)
        return (Encoding(inputs=x, labels=y),)

    return loop(step, arguments, model=model, opt=opt)


@idiom(ranks=True)
def next_batch_inside() -> Loop:
    """`next(loader)`, begun again where it ends."""
    model, opt = small_training()
    batches = [batch(number) for number in range(4)]
    source, epochs = {"it": iter(batches)}, {"n": 0}

    def step():
        try:
            x, y = next(source["it"])
        except StopIteration:
            epochs["n"] += 1
            source["it"] = iter(batches)
            x, y = next(source["it"])
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, lambda call: (), model=model, opt=opt, epochs=epochs)


@idiom()
def data_loader_inside() -> Loop:
    """A shuffling DataLoader that never ends, as a generator function."""
    model, opt = small_training()
    x, y = batch(0, 12)

    def endless(loader):
        while True:
            yield from loader

    source = endless(DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True))

    def step():
        x, y = next(source)
        return update(F.cross_entropy(model(x), y), opt), len(x)

    return loop(step, lambda call: (), model=model, opt=opt)


@idiom()
def arrays_of_numpy() -> Loop:
    """The caller's arrays become tensors inside; one buffer is used again in every call."""
    model, opt = small_training()
    buffer = torch.empty(5, FEATURES).numpy()

    def step(x, y):
        buffer[:] = x / 2.0
        loss = F.cross_entropy(model(torch.from_numpy(buffer)), torch.as_tensor(y))
        update(loss, opt)
        buffer[:] = 0.0
        return float(loss.detach().numpy())

    return loop(step, lambda call: tuple(one.numpy() for one in batch(call)), model=model, opt=opt)


@idiom()
def text_and_flags_as_arguments() -> Loop:
    """The name of a phase, a flag and a rate come from the caller, another one in every call."""
    model, opt = small_training()

    def step(x, phase, weight, *, flip):
        x = x.flip(0) if flip else x
        loss = model(x).pow(2).mean() if phase == "shrink" else F.l1_loss(model(x), x[:, :CLASSES])
        return update(weight * loss, opt), f"{phase}: {weight:.2f}"

    def flipped(x, phase, weight, flip):
        return step(x, phase, weight, flip=flip)

    def arguments(call):
        return (*features(call), ("shrink", "fit")[call % 2], 1.0 / (1 + call), call % 3 == 0)

    return loop(flipped, arguments, model=model, opt=opt)


@idiom()
def batches_from_a_thread() -> Loop:
    """A thread makes batches ahead and puts them into a queue; the step takes one."""
    model, opt = small_training()
    ready = queue.Queue(2)

    def produce():
        for call in range(10):
            ready.put(batch(call))

    threading.Thread(target=produce, daemon=True).start()

    def step():
        x, y = ready.get()
        ready.task_done()
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, lambda call: (), model=model, opt=opt)


@idiom()
def batch_of_one_buffer() -> Loop:
    """The caller writes each batch into the same tensors."""
    model, opt = small_training()
    held_x, held_y = batch(0)

    def step(x, y):
        return update(F.cross_entropy(model(x), y), opt)

    def arguments(call):
        x, y = batch(call)
        held_x.copy_(x)
        held_y.copy_(y)
        return held_x, held_y

    return loop(step, arguments, model=model, opt=opt)


@idiom(raises=IndexError)
def label_out_of_range() -> Loop:
    """One batch has a label that is no class: an error of values, which the caller catches."""
    model, opt = small_training()

    def step(x, y):
        return update(F.cross_entropy(model(x), y), opt)

    def arguments(call):
        x, y = batch(call)
        return x, (y + CLASSES if call == 4 else y)

    return loop(step, arguments, model=model, opt=opt)


@idiom()
def batch_wrapped_in_a_class() -> Loop:
    """A batch as an object of the user, with a method that pins or moves it and one that splits it."""
    model, opt = small_training()

    class Samples:
        def __init__(self, x, y):
            self.x, self.y, self.moved = x, y, False

        def to(self, device):
            self.x, self.y, self.moved = self.x.to(device), self.y.to(device), True
            return self

        def halves(self):
            return (Samples(*pair) for pair in zip(self.x.split(3), self.y.split(3), strict=True))

    def step(samples):
        losses = [F.cross_entropy(model(half.x), half.y) for half in samples.to("cpu").halves()]
        return update(torch.stack(losses).mean(), opt), samples.moved

    return loop(step, lambda call: (Samples(*batch(call)),), model=model, opt=opt)
